#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/error.h>

#include "checkpoint/generic_dict.h"
#include "parallel/ddp/model_loads.h"

namespace paceline {
namespace {

using checkpoint::GenericDict;

constexpr std::string_view kExtraState = "_extra_state";

// Python's order: of each module its parameters, its buffers, and then its children.
void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& state) {
  for (const auto& one : module.named_parameters(/*recurse=*/false)) {
    if (one.value().defined()) state.insert(prefix + one.key(), one.value().detach());
  }
  for (const auto& one : module.named_buffers(/*recurse=*/false)) {
    if (one.value().defined()) state.insert(prefix + one.key(), one.value().detach());
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", state);
  }
}

// Collects the tensors of a torch.nn.Module that pickle_load gave as a record of its attributes.
class PickledModule {
 public:
  // NOLINTNEXTLINE(misc-no-recursion): pickle_load bounds the nesting
  void collect(const GenericDict& module, const std::string& prefix) {
    count_name();
    for (const auto& one : part(module, "_parameters")) add(prefix, one.key(), one.value());
    const auto left_out = module.find("_non_persistent_buffers_set");
    for (const auto& one : part(module, "_buffers")) {
      const bool is_left_out = left_out != module.end() && left_out->value().isList() &&
                               std::ranges::find(left_out->value().toListRef(), one.key()) !=
                                   left_out->value().toListRef().end();
      if (!is_left_out) add(prefix, one.key(), one.value());
    }
    for (const auto& child : part(module, "_modules")) {
      if (child.value().isNone()) continue;
      if (!child.value().isGenericDict()) {
        throw Error(fmt::format("state_dict: the submodule {}{} is a {}", prefix,
                                child.key().toStringRef(), child.value().tagKind()));
      }
      collect(child.value().toGenericDict(), prefix + child.key().toStringRef() + ".");
    }
  }

  StateDict state{};

 private:
  static GenericDict part(const GenericDict& module, const char* name) {
    const auto found = module.find(name);
    if (found != module.end() && found->value().isGenericDict()) {
      const auto part = found->value().toGenericDict();
      if (std::all_of(part.begin(), part.end(),
                      [](const auto& one) { return one.key().isString(); })) {
        return part;
      }
    }
    throw Error(fmt::format("state_dict: a module has no {}", name));
  }
  void add(const std::string& prefix, const at::IValue& name, const at::IValue& value) {
    count_name();
    if (value.isNone()) return;
    if (!value.isTensor()) {
      throw Error(fmt::format("state_dict: {}{} is a {}, not a tensor", prefix, name.toStringRef(),
                              value.tagKind()));
    }
    const std::string full = prefix + name.toStringRef();
    if (state.contains(full)) throw Error(fmt::format("state_dict: there are two {}", full));
    state.insert(full, value.toTensor().detach());
  }
  // One module may be the child of many, and then has as many names.
  void count_name() {
    constexpr int kMost = 1'000'000;
    if (++names_ > kMost) throw Error("state_dict: the module has more than a million names");
  }

  int names_ = 0;
};

bool is_module(const GenericDict& dict) {
  return dict.contains("_parameters") && dict.contains("_buffers") && dict.contains("_modules");
}

bool is_state_dict(const at::IValue& value) {
  if (!value.isGenericDict()) return false;
  const GenericDict dict = value.toGenericDict();
  // Not a tensor is what a module adds by get_extra_state().
  return std::all_of(dict.begin(), dict.end(), [](const auto& one) {
    return one.key().isString() &&
           (one.value().isTensor() || one.key().toStringRef().ends_with(kExtraState));
  });
}

// "a, b, c and 4 more".
std::string list(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 10;
  if (names.size() <= kMost) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kMost, ", "),
                     names.size() - kMost);
}

// A state dict of a model in Python's DistributedDataParallel, without the wrapper's name.
StateDict without_prefix(const StateDict& state, const StateDict& own) {
  constexpr std::string_view kPrefix = "module.";
  const auto is_wrapped = [&](const auto& one) { return one.key().starts_with(kPrefix); };
  if (state.is_empty() || !std::ranges::all_of(state, is_wrapped) ||
      std::ranges::any_of(own, is_wrapped)) {
    return state;
  }
  StateDict bare;
  for (const auto& one : state) bare.insert(one.key().substr(kPrefix.size()), one.value());
  return bare;
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict state;
  collect(module, "", state);
  return state;
}

StateDict state_dict(const at::IValue& value) {
  if (value.isGenericDict() && is_module(value.toGenericDict())) {
    PickledModule module;
    module.collect(value.toGenericDict(), "");
    return std::move(module.state);
  }
  StateDict state;
  if (is_state_dict(value)) {
    for (const auto& one : value.toGenericDict()) {
      if (!one.value().isTensor()) continue;
      state.insert(one.key().toStringRef(), one.value().toTensor().detach());
    }
    return state;
  }
  if (!value.isGenericDict()) {
    throw Error(
        fmt::format("state_dict: a {} is no dict of tensors by their names", value.tagKind()));
  }
  std::vector<std::string> names;
  std::string hint;
  for (const auto& one : value.toGenericDict()) {
    if (!one.key().isString()) continue;
    names.push_back(one.key().toStringRef());
    const bool has_tensors =
        (is_state_dict(one.value()) && !one.value().toGenericDict().empty()) ||
        (one.value().isGenericDict() && is_module(one.value().toGenericDict()));
    if (has_tensors && hint.empty()) {
      hint = fmt::format(": use state_dict(pickle_load(path).toGenericDict().at(\"{}\"))",
                         names.back());
    }
  }
  throw Error(fmt::format("state_dict: not all values of the dict are tensors; it has {}{}",
                          list(names), hint));
}

void load_state_dict(torch::nn::Module& module, const StateDict& given, bool strict) {
  const StateDict own = state_dict(module);
  const StateDict state = without_prefix(given, own);
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> different;
  for (const auto& one : own) {
    const at::Tensor* const found = state.find(one.key());
    if (found == nullptr) {
      missing.push_back(one.key());
    } else if (found->sizes() != one.value().sizes()) {
      different.push_back(fmt::format("{} ({} in place of {})", one.key(),
                                      fmt::join(found->sizes(), "x"),
                                      fmt::join(one.value().sizes(), "x")));
    }
  }
  for (const auto& one : state) {
    if (!own.contains(one.key())) unexpected.push_back(one.key());
  }
  std::string problems;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (names.empty()) return;
    problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", what, list(names));
  };
  if (strict) add("missing", missing);
  if (strict) add("not of this module", unexpected);
  add("of another shape", different);
  if (!problems.empty()) {
    throw Error(fmt::format("load_state_dict: the tensors do not fit the module {}: {}",
                            module.name(), problems));
  }
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> converted;  // first all, so that none may fail
  for (const auto& one : own) {
    const at::Tensor* const found = state.find(one.key());
    if (found == nullptr) continue;
    try {
      TORCH_CHECK(found->layout() == one.value().layout(), "its layout differs");
      TORCH_CHECK(!found->is_complex() || one.value().is_complex(), "it is complex");
      converted.emplace_back(one.value(), found->to(one.value().options()));
    } catch (const c10::Error& error) {
      throw Error(fmt::format("load_state_dict: {} of the module {} cannot be copied: {}",
                              one.key(), module.name(), error.msg()));
    }
  }
  for (auto& [to, from] : converted) to.copy_(from);
  ddp::count_model_load();
}

}  // namespace paceline
