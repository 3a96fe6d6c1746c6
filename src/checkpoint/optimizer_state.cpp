#include <ATen/core/ivalue.h>
#include <fmt/format.h>
#include <torch/optim.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/error.h>
#include <paceline/optimizers.h>

#include "checkpoint/generic_dict.h"

namespace paceline {
namespace {

using checkpoint::empty_dict;
using checkpoint::GenericDict;
using GenericList = c10::impl::GenericList;
using namespace torch::optim;

// The members of LibTorch's and our classes by the names that Python's optimizers have for them.
template <typename Visitor>
void visit(SGDOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("momentum", options.momentum());
  visitor("dampening", options.dampening());
  visitor("weight_decay", options.weight_decay());
  visitor("nesterov", options.nesterov());
}
template <typename Visitor>
void visit(SGDParamState& state, Visitor& visitor) {
  visitor("momentum_buffer", state.momentum_buffer());
}

template <typename Options, typename Visitor>
void visit_adam_options(Options& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("betas", options.betas());
  visitor("eps", options.eps());
  visitor("weight_decay", options.weight_decay());
  visitor("amsgrad", options.amsgrad());
}
template <typename State, typename Visitor>
void visit_adam_state(State& state, Visitor& visitor) {
  visitor("step", state.step());
  visitor.required("exp_avg", state.exp_avg());
  visitor.required("exp_avg_sq", state.exp_avg_sq());
  visitor("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <typename Visitor>
void visit(AdamOptions& options, Visitor& visitor) {
  visit_adam_options(options, visitor);
}
template <typename Visitor>
void visit(AdamParamState& state, Visitor& visitor) {
  visit_adam_state(state, visitor);
}
template <typename Visitor>
void visit(AdamWOptions& options, Visitor& visitor) {
  visit_adam_options(options, visitor);
}
template <typename Visitor>
void visit(AdamWParamState& state, Visitor& visitor) {
  visit_adam_state(state, visitor);
}

template <typename Visitor>
void visit(RMSpropOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("alpha", options.alpha());
  visitor("eps", options.eps());
  visitor("weight_decay", options.weight_decay());
  visitor("momentum", options.momentum());
  visitor("centered", options.centered());
}
template <typename Visitor>
void visit(RMSpropParamState& state, Visitor& visitor) {
  visitor("step", state.step());
  visitor.required("square_avg", state.square_avg());
  visitor("momentum_buffer", state.momentum_buffer());
  visitor("grad_avg", state.grad_avg());
}

template <typename Visitor>
void visit(AdagradOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("lr_decay", options.lr_decay());
  visitor("weight_decay", options.weight_decay());
  visitor("initial_accumulator_value", options.initial_accumulator_value());
  visitor("eps", options.eps());
}
template <typename Visitor>
void visit(AdagradParamState& state, Visitor& visitor) {
  visitor("step", state.step());
  visitor.required("sum", state.sum());
}

template <typename Visitor>
void visit(LBFGSOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("max_iter", options.max_iter());
  visitor("max_eval", options.max_eval());
  visitor("tolerance_grad", options.tolerance_grad());
  visitor("tolerance_change", options.tolerance_change());
  visitor("history_size", options.history_size());
  visitor("line_search_fn", options.line_search_fn());
}
template <typename Visitor>
void visit(LBFGSParamState& state, Visitor& visitor) {
  visitor("func_evals", state.func_evals());
  visitor("n_iter", state.n_iter());
  visitor("t", state.t());
  visitor("prev_loss", state.prev_loss());
  visitor("d", state.d());
  visitor("prev_flat_grad", state.prev_flat_grad());
  visitor("old_dirs", state.old_dirs());
  visitor("old_stps", state.old_stps());
  visitor.scalar("H_diag", state.H_diag());
  visitor.scalar("ro", state.ro());
  visitor.scalar("al", state.al());
}

template <typename Visitor>
void visit(optim::MuonOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("weight_decay", options.weight_decay());
  visitor("momentum", options.momentum());
  visitor("nesterov", options.nesterov());
  visitor("ns_coefficients", options.ns_coefficients());
  visitor("eps", options.eps());
  visitor("ns_steps", options.ns_steps());
  visitor("adjust_lr_fn", options.adjust_lr_fn());
}
template <typename Visitor>
void visit(optim::MuonParamState& state, Visitor& visitor) {
  visitor.required("momentum_buffer", state.momentum_buffer());
}

// Stores each member in a dict.
class MemberReader {
 public:
  explicit MemberReader(const GenericDict& dict) : dict_(dict) {}

  void required(const char* name, const at::Tensor& tensor) { (*this)(name, tensor); }
  template <typename Member>
  void scalar(const char* name, const Member& member) {
    (*this)(name, member);
  }
  template <typename Member>
  void operator()(const char* name, const Member& member) {
    dict_.insert(name, value_of(member));
  }

 private:
  template <typename Number>
  static at::IValue value_of(const Number& number) {
    return number;
  }
  static at::IValue value_of(const at::Tensor& tensor) {
    return tensor.defined() ? at::IValue(tensor.detach()) : at::IValue();
  }
  template <typename... Numbers>
  static at::IValue value_of(const std::tuple<Numbers...>& numbers) {
    return std::apply(
        [](Numbers... each) { return c10::ivalue::Tuple::create({at::IValue(each)...}); }, numbers);
  }
  template <typename Value>
  static at::IValue value_of(const std::optional<Value>& value) {
    return value ? value_of(*value) : at::IValue();
  }
  static at::IValue value_of(const std::deque<at::Tensor>& tensors) { return list_of(tensors); }
  static at::IValue value_of(const std::vector<at::Tensor>& tensors) { return list_of(tensors); }
  template <typename Tensors>
  static GenericList list_of(const Tensors& tensors) {
    GenericList list(c10::AnyType::get());
    for (const at::Tensor& tensor : tensors) list.push_back(value_of(tensor));
    return list;
  }

  GenericDict dict_;
};

template <typename Member>
constexpr bool kMayBeNone = std::is_same_v<Member, at::Tensor>;
template <typename Value>
constexpr bool kMayBeNone<std::optional<Value>> = true;

// Sets each member to what a dict has.
class MemberWriter {
 public:
  // `place` is for messages. `options` and `shape` are what the tensors of a state must have.
  MemberWriter(const GenericDict& dict, std::string place, at::TensorOptions options = {},
               std::vector<std::int64_t> shape = {})
      : dict_(dict), place_(std::move(place)), options_(options), shape_(std::move(shape)) {}

  // A tensor without which the optimizer could not go on.
  void required(const char* name, at::Tensor& tensor) {
    (*this)(name, tensor);
    if (!tensor.defined()) {
      throw Error(fmt::format("load_state_dict: {} has no '{}'", place_, name));
    }
  }
  // A tensor without dimensions, or several.
  template <typename Member>
  void scalar(const char* name, Member& member) {
    const auto shape = std::exchange(shape_, {});
    (*this)(name, member);
    shape_ = shape;
  }
  template <typename Member>
  void operator()(const char* name, Member& member) {
    const auto found = dict_.find(name);
    // Python's states leave out what an optimizer's options, or its first steps, do without.
    const bool is_there = found != dict_.end();
    if (!is_there && !kMayBeNone<Member>) {
      throw Error(fmt::format("load_state_dict: {} has no '{}'", place_, name));
    }
    const at::IValue value = is_there ? found->value() : at::IValue();
    try {
      set(member, value);
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      throw Error(
          fmt::format("load_state_dict: '{}' of {} is a {}", name, place_, value.tagKind()));
    }
  }

 private:
  static void set(double& number, const at::IValue& value) {
    number = (value.isTensor() ? value.toTensor().item() : value.toScalar()).toDouble();
  }
  static void set(bool& flag, const at::IValue& value) { flag = value.toBool(); }
  // Python's optimizers have tensors for steps.
  static void set(std::int64_t& number, const at::IValue& value) {
    number = value.isTensor() ? value.toTensor().item().toLong() : value.toInt();
  }
  static void set(std::string& text, const at::IValue& value) { text = value.toStringRef(); }
  // A program may have set a list in Python.
  template <typename... Numbers>
  static void set(std::tuple<Numbers...>& numbers, const at::IValue& value) {
    const auto elements =
        value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    TORCH_CHECK(elements.size() == sizeof...(Numbers));
    auto next = elements.begin();
    std::apply([&](Numbers&... each) { (set(each, *next++), ...); }, numbers);
  }
  void set(at::Tensor& tensor, const at::IValue& value) const {
    if (value.isNone()) {
      tensor.reset();
      return;
    }
    // LBFGS begins with a number in Python.
    tensor = value.isScalar() ? at::scalar_tensor(value.toScalar(), options_)
                              : value.toTensor().detach().clone();
    if (tensor.sizes() != shape_) {
      throw Error(
          fmt::format("load_state_dict: {} has a tensor of shape {}, and its parameters need {}",
                      place_, c10::str(tensor.sizes()), c10::str(at::IntArrayRef(shape_))));
    }
    // LibTorch's LBFGS begins with an integer tensor for H_diag.
    const bool is_number = tensor.is_floating_point() || tensor.is_complex() || tensor.dim() == 0;
    if (tensor.layout() != at::kStrided || !is_number) {
      throw Error(
          fmt::format("load_state_dict: {} has a tensor of {}, and not a dense one of float",
                      place_, c10::toString(tensor.scalar_type())));
    }
    tensor = tensor.to(options_);
  }
  template <typename Value>
  void set(std::optional<Value>& optional, const at::IValue& value) const {
    optional.reset();
    if (!value.isNone()) set(optional.emplace(), value);
  }
  void set(std::deque<at::Tensor>& tensors, const at::IValue& value) const {
    set_list(tensors, value);
  }
  void set(std::vector<at::Tensor>& tensors, const at::IValue& value) const {
    set_list(tensors, value);
  }
  template <typename Tensors>
  void set_list(Tensors& tensors, const at::IValue& value) const {
    tensors.clear();
    for (const at::IValue& one : value.toListRef()) set(tensors.emplace_back(), one);
  }

  GenericDict dict_;
  std::string place_;
  at::TensorOptions options_;
  std::vector<std::int64_t> shape_;
};

// LBFGS has one state, whose tensors are of all parameters together.
template <typename State>
std::vector<std::int64_t> shape_of_state(const std::vector<at::Tensor>& parameters, std::size_t i) {
  if (!std::is_same_v<State, LBFGSParamState>) return parameters[i].sizes().vec();
  std::int64_t size = 0;
  for (const at::Tensor& parameter : parameters) size += parameter.numel();
  return {size};
}
template <typename State>
at::TensorOptions options_of_state(const std::vector<at::Tensor>& parameters, std::size_t i) {
  at::ScalarType type = parameters[i].scalar_type();
  if (std::is_same_v<State, LBFGSParamState>) {
    for (const at::Tensor& parameter : parameters) {
      type = c10::promoteTypes(type, parameter.scalar_type());
    }
  }
  return parameters[i].options().dtype(type);
}

template <typename O, typename S>
struct Kind {
  using Options = O;
  using State = S;
};

// Calls the function with the Kind that the optimizer is of, by its options.
template <typename Function>
void with_kind(const Optimizer& optimizer, Function function) {
  const OptimizerOptions& options = optimizer.defaults();
  const auto attempt = [&]<typename K>(K kind) {
    if (dynamic_cast<const typename K::Options*>(&options) == nullptr) return false;
    function(kind);
    return true;
  };
  if (attempt(Kind<SGDOptions, SGDParamState>()) || attempt(Kind<AdamOptions, AdamParamState>()) ||
      attempt(Kind<AdamWOptions, AdamWParamState>()) ||
      attempt(Kind<RMSpropOptions, RMSpropParamState>()) ||
      attempt(Kind<AdagradOptions, AdagradParamState>()) ||
      attempt(Kind<LBFGSOptions, LBFGSParamState>()) ||
      attempt(Kind<optim::MuonOptions, optim::MuonParamState>())) {
    return;
  }
  throw UsageError(
      "state_dict of an optimizer that is not one of LibTorch's or Paceline's: SGD, Adam, AdamW, "
      "RMSprop, Adagrad, LBFGS, Muon");
}

}  // namespace

at::IValue state_dict(const Optimizer& optimizer) {
  GenericDict states = empty_dict();
  GenericList groups(c10::AnyType::get());
  with_kind(optimizer, [&]<typename Options, typename State>(Kind<Options, State>) {
    std::int64_t index = 0;
    for (const OptimizerParamGroup& group : optimizer.param_groups()) {
      GenericDict options = empty_dict();
      auto copy = dynamic_cast<const Options&>(group.options());
      MemberReader read_options(options);
      visit(copy, read_options);
      GenericList indices(c10::AnyType::get());
      for (const at::Tensor& parameter : group.params()) {
        const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (found != optimizer.state().end()) {
          GenericDict state = empty_dict();
          MemberReader read_state(state);
          visit(dynamic_cast<State&>(*found->second), read_state);
          states.insert(index, state);
        }
        indices.push_back(index++);
      }
      options.insert("params", indices);
      groups.push_back(options);
    }
  });
  GenericDict dict = empty_dict();
  dict.insert("state", states);
  dict.insert("param_groups", groups);
  return dict;
}

namespace {

// Options of Python's optimizers that would change a step, and that LibTorch's do not have.
template <typename Options>
void check_unknown_options(const GenericDict& group, std::size_t number) {
  constexpr bool kIsAdam = std::is_same_v<Options, AdamOptions>;
  const auto refuse = [&](const char* name, bool wrong) {
    const auto found = group.find(name);
    if (found == group.end() || !found->value().isBool() || found->value().toBool() != wrong)
      return;
    throw Error(
        fmt::format("load_state_dict: group {} has {} = {}, which LibTorch does not support",
                    number, name, wrong ? "True" : "False"));
  };
  refuse("maximize", true);
  if (kIsAdam || std::is_same_v<Options, AdamWOptions>) refuse("decoupled_weight_decay", kIsAdam);
}

}  // namespace

void load_state_dict(Optimizer& optimizer, const at::IValue& value) {
  const auto part = [](const at::IValue& from, const char* name) {
    if (from.isGenericDict()) {
      const GenericDict dict = from.toGenericDict();
      const auto found = dict.find(name);
      if (found != dict.end()) return found->value();
    }
    throw Error(
        fmt::format("load_state_dict: this is no state of an optimizer: it has no '{}'", name));
  };
  const at::IValue states = part(value, "state");
  const at::IValue groups = part(value, "param_groups");
  if (!states.isGenericDict() || !groups.isList() ||
      groups.toListRef().size() != optimizer.param_groups().size()) {
    throw Error(fmt::format(
        "load_state_dict: the state has {} parameter groups, and the optimizer {}",
        groups.isList() ? groups.toListRef().size() : 0, optimizer.param_groups().size()));
  }
  // Everything is read before anything is changed.
  std::vector<std::unique_ptr<OptimizerOptions>> new_options;
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> new_states;
  with_kind(optimizer, [&]<typename Options, typename State>(Kind<Options, State>) {
    std::size_t found_states = 0;
    for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      const OptimizerParamGroup& group = optimizer.param_groups()[i];
      const at::IValue& given = groups.toListRef()[i];
      const at::IValue indices = part(given, "params");
      if (!indices.isList() || indices.toListRef().size() != group.params().size()) {
        throw Error(fmt::format(
            "load_state_dict: group {} has {} parameters, and that of the optimizer {}", i,
            indices.isList() ? indices.toListRef().size() : 0, group.params().size()));
      }
      check_unknown_options<Options>(given.toGenericDict(), i);
      auto options = std::make_unique<Options>(dynamic_cast<const Options&>(group.options()));
      MemberWriter write_options(given.toGenericDict(), fmt::format("group {}", i));
      visit(*options, write_options);
      new_options.push_back(std::move(options));
      for (std::size_t k = 0; k < group.params().size(); ++k) {
        const at::Tensor& parameter = group.params()[k];
        const at::IValue& id = indices.toListRef()[k];
        if (!id.isInt() && !id.isString()) {
          throw Error(fmt::format("load_state_dict: group {} has a parameter whose id is a {}", i,
                                  id.tagKind()));
        }
        const auto found = states.toGenericDict().find(id);
        const auto place = id.isInt()
                               ? fmt::format("the state of parameter {}", id.toInt())
                               : fmt::format("the state of parameter '{}'", id.toStringRef());
        if (found == states.toGenericDict().end()) continue;
        ++found_states;
        if (!found->value().isGenericDict()) {
          throw Error(fmt::format("load_state_dict: {} is no dict", place));
        }
        auto state = std::make_unique<State>();
        MemberWriter write_state(found->value().toGenericDict(), place,
                                 options_of_state<State>(group.params(), k),
                                 shape_of_state<State>(group.params(), k));
        visit(*state, write_state);
        new_states.emplace_back(parameter.unsafeGetTensorImpl(), std::move(state));
      }
    }
    if (found_states != states.toGenericDict().size()) {
      throw Error(fmt::format(
          "load_state_dict: there are {} states, and {} of them are of parameters in 'params'",
          states.toGenericDict().size(), found_states));
    }
  });
  for (std::size_t i = 0; i < new_options.size(); ++i) {
    optimizer.param_groups()[i].set_options(std::move(new_options[i]));
  }
  optimizer.state().clear();
  for (auto& [parameter, state] : new_states) optimizer.state()[parameter] = std::move(state);
}

}  // namespace paceline
