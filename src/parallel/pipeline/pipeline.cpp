#include <paceline/pipeline.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "distributed/backend.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"
#include "parallel/ddp/ddp_core.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/stage_link.h"

namespace paceline::detail {
namespace {

using pipeline::Action;
using pipeline::StageLink;
using pipeline::Subject;
using Kind = PipelineAction::Kind;
using Clock = std::chrono::steady_clock;

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// The same memory, which unlike a leaf's may be changed in place.
class NonLeaf : public torch::autograd::Function<NonLeaf> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& leaf) {
    return leaf.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return gradients;
  }
};

at::Device device_of(const torch::nn::Module& stage) {
  const auto parameters = stage.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

std::string name_of(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::gpipe:
      return "gpipe";
    case PipelineSchedule::one_f_one_b:
      return "one_f_one_b";
  }
  throw UsageError(fmt::format("{} is no PipelineSchedule: use gpipe or one_f_one_b",
                               static_cast<int>(schedule)));
}

void check_options(const PipelineOptions& options) {
  if (options.n_microbatches < 1) {
    throw UsageError(
        fmt::format("n_microbatches of {}: it must be at least 1", options.n_microbatches));
  }
  if (!options.ddp) return;
  if (options.ddp->average == Average::samples) {
    throw UsageError(
        "PipelineOptions::ddp with Average::samples: pipelines average by ranks; give all of them "
        "batches of one size");
  }
  if (options.ddp->logical_ranks != 0) {
    throw UsageError(
        "PipelineOptions::ddp with logical_ranks: a Pipeline accumulates over micro-batches, and "
        "has no loop over logical ranks");
  }
}

// On the last stage, whose loss might broadcast one against the other.
void check_same_samples(const PipelineHandle::Tensors& inputs, const at::Tensor& target) {
  if (!target.defined() || target.dim() == 0) return;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.dim() == 0 || input.size(0) == target.size(0)) continue;
    throw UsageError(
        fmt::format("the input of a Pipeline has {} samples, and the target {}: their first "
                    "dimensions must be equal",
                    input.size(0), target.size(0)));
  }
}

// Collective. Returns the number that stage 0 gives this Pipeline. Throws UsageError, the same on
// all ranks.
std::int64_t agree_on_options(const PipelineOptions& options) {
  static std::atomic<std::int64_t> made = 0;
  const auto own = fmt::format("{} {} micro-batches with the schedule {}", made++,
                               options.n_microbatches, name_of(options.schedule));
  const auto all = all_gather_bytes(own, {.group = options.process_group});
  const auto text_of = [&](std::size_t stage) {
    return all[stage].substr(all[stage].find(' ') + 1);
  };
  for (std::size_t stage = 1; stage < all.size(); ++stage) {
    if (text_of(stage) == text_of(0)) continue;
    throw UsageError(
        fmt::format("stage {} of a Pipeline has {}, and stage 0 {}: give all stages "
                    "the same options",
                    stage, text_of(stage), text_of(0)));
  }
  return std::stoll(all[0]);
}

// Collective over the group. Otherwise the gradients of different layers would be averaged.
void check_same_stage(int stage, int stages, const ProcessGroup& group) {
  const auto text = fmt::format("stage {} of {}", stage, stages);
  const auto all = all_gather_bytes(text, {.group = group});
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw UsageError(fmt::format(
        "PipelineOptions::ddp: rank {} runs {}, and rank {} {}: give as ddp->process_group the "
        "ranks that run the same stage, as init_device_mesh makes them",
        distributed::global_rank_of(group, static_cast<int>(rank)), all[rank],
        distributed::global_rank_of(group, 0), all[0]));
  }
}

}  // namespace

void throw_wrong_inputs(std::size_t count) {
  throw UsageError(fmt::format(
      "a Pipeline's stage gets {} tensors, and its forward does not take them: it takes what the "
      "stage before returns, as arguments or as a std::vector, and at most {}",
      count, kMaxStageTensors));
}

const at::Tensor& only_output(const PipelineHandle::Tensors& outputs) {
  if (outputs.size() == 1) return outputs.front();
  throw UsageError(
      fmt::format("the last stage of a Pipeline returns {} tensors, and the loss takes one: let it "
                  "take a std::vector of tensors",
                  outputs.size()));
}

class PipelineHandle::Impl {
 public:
  Impl(torch::nn::Module& stage, Forward forward, Loss loss, const PipelineOptions& options)
      : options_(options),
        forward_(std::move(forward)),
        loss_(std::move(loss)),
        link_(options.process_group, device_of(stage)) {
    check_options(options_);
    number_ = agree_on_options(options_);
    actions_ = pipeline::actions_of(options_.schedule, link_.stage(), link_.stages(),
                                    options_.n_microbatches);
    if (!options_.ddp) return;
    check_same_stage(link_.stage(), link_.stages(), options_.ddp->process_group);
    ddp_ = std::make_unique<DdpCore>(ddp::WrappedModel(stage), *options_.ddp);
  }

  at::Tensor step(const Tensors& inputs, const at::Tensor& target);
  Tensors evaluate(const Tensors& inputs);
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  const PipelineStats& stats() const { return stats_; }

 private:
  // A micro-batch between its forward and its backward.
  struct Microbatch {
    Tensors inputs;  // leaves, on all stages but the first
    Tensors outputs;
  };
  using Batches = std::vector<Tensors>;

  Subject subject(Kind kind, std::int64_t microbatch) const {
    return {.pipeline = number_,
            .kind = kind,
            .microbatch = microbatch,
            .microbatches = options_.n_microbatches,
            .call = calls_,
            .training = at::GradMode::is_enabled()};
  }
  void begin_call(const at::Tensor& target) {
    ++calls_;
    link_.begin_call(target);
  }
  void check_divided(const at::Tensor& tensor, const char* what, bool is_read) const;
  Batches split(const Tensors& tensors, const char* what) const;
  Tensors inputs_of(std::int64_t microbatch, const Batches& batch);
  void forward(std::int64_t microbatch, const Batches& batch, const Batches& targets);
  void backward(std::int64_t microbatch);
  template <typename Body>
  void record(Action action, Body&& body);
  template <typename Body>
  void abort_if_throws(Body&& body);

  PipelineOptions options_;
  Forward forward_;
  Loss loss_;
  StageLink link_;
  std::int64_t number_ = 0;
  std::vector<Action> actions_;
  std::unique_ptr<DdpCore> ddp_;
  std::int64_t calls_ = 0;  // steps and evaluations
  // Of the step that runs:
  std::vector<Microbatch> open_;
  at::Tensor loss_sum_;
  Clock::time_point begin_;
  PipelineStats stats_;
};

// On every stage that has the tensor, so that none waits for one that refuses the batch. `what`:
// for errors. `is_read`: on this stage.
void PipelineHandle::Impl::check_divided(const at::Tensor& tensor, const char* what,
                                         bool is_read) const {
  const std::int64_t m = options_.n_microbatches;
  if (!tensor.defined() || tensor.dim() == 0 || tensor.size(0) % m == 0) return;
  throw UsageError(fmt::format(
      "{} of a Pipeline has {} samples, which {} micro-batches do not divide: drop the last, "
      "smaller batch (drop_last), or choose another n_microbatches{}",
      what, tensor.size(0), m,
      is_read ? "" : "; or pass an undefined tensor, as this stage does not read it"));
}

// By micro-batch. `what`: for errors.
auto PipelineHandle::Impl::split(const Tensors& tensors, const char* what) const -> Batches {
  const std::int64_t m = options_.n_microbatches;
  Batches batches(static_cast<std::size_t>(m));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.dim() == 0) {
      throw UsageError(fmt::format(
          "{} of a Pipeline is {}: it must be a tensor with the samples in its first dimension",
          what, tensor.defined() ? "a single number" : "undefined"));
    }
    const auto parts = at::tensor_split(tensor, m);
    for (std::size_t i = 0; i < batches.size(); ++i) batches[i].push_back(parts[i]);
  }
  return batches;
}

// Runs one action, once its tensors are there, and takes its times.
template <typename Body>
void PipelineHandle::Impl::record(Action action, Body&& body) {
  const auto begin = Clock::now();
  body();
  stats_.last.push_back({.kind = action.kind,
                         .microbatch = action.microbatch,
                         .begin = begin - begin_,
                         .end = Clock::now() - begin_});
}

// In the middle of a call other stages wait for this one.
template <typename Body>
void PipelineHandle::Impl::abort_if_throws(Body&& body) {
  try {
    body();
  } catch (...) {
    if (link_.stages() > 1) {
      distributed::abort_because(*options_.process_group.c10d(),
                                 distributed::current_exception_text());
    }
    throw;
  }
}

at::Tensor PipelineHandle::Impl::step(const Tensors& inputs, const at::Tensor& target) {
  begin_call(target);
  if (!at::GradMode::is_enabled()) {
    throw UsageError("Pipeline::step computes gradients, and grad mode is off: use evaluate");
  }
  if (link_.is_last()) check_same_samples(inputs, target);
  for (const at::Tensor& input : inputs) check_divided(input, "the input", link_.is_first());
  check_divided(target, "the target", link_.is_last());
  const Batches parts = link_.is_first() ? split(inputs, "the input") : Batches();
  const Batches targets = link_.is_last() ? split({target}, "the target") : Batches();
  open_.assign(static_cast<std::size_t>(options_.n_microbatches), {});
  loss_sum_.reset();
  stats_.last.clear();
  begin_ = Clock::now();
  // The link counts the bytes of evaluations too.
  const std::int64_t sent_before = link_.bytes_sent();
  const std::int64_t received_before = link_.bytes_received();
  const bool is_only = options_.n_microbatches == 1;
  abort_if_throws([&] {
    if (ddp_) ddp_->before_forward(true, is_only, !is_only);
    for (const Action& action : actions_) {
      if (action.kind == Kind::forward) {
        forward(action.microbatch, parts, targets);
      } else {
        backward(action.microbatch);
      }
    }
    link_.wait(calls_);
  });
  stats_.last_time = Clock::now() - begin_;
  stats_.bytes_sent += link_.bytes_sent() - sent_before;
  stats_.bytes_received += link_.bytes_received() - received_before;
  ++stats_.steps;
  return loss_sum_;
}

auto PipelineHandle::Impl::inputs_of(std::int64_t microbatch, const Batches& batch) -> Tensors {
  if (link_.is_first()) return batch[static_cast<std::size_t>(microbatch)];
  return link_.recv(link_.stage() - 1, subject(Kind::forward, microbatch));
}

void PipelineHandle::Impl::forward(std::int64_t microbatch, const Batches& batch,
                                   const Batches& targets) {
  Microbatch& one = open_[static_cast<std::size_t>(microbatch)];
  one.inputs = inputs_of(microbatch, batch);
  record({Kind::forward, microbatch}, [&] {
    Tensors inputs = one.inputs;
    for (at::Tensor& input : inputs) {
      if (!link_.is_first() && needs_gradient(input)) input = NonLeaf::apply(input);
    }
    one.outputs = forward_(inputs);
    if (!link_.is_last()) return;
    const at::Tensor loss =
        loss_(one.outputs, targets[static_cast<std::size_t>(microbatch)].front());
    if (!loss.defined() || loss.numel() != 1) {
      throw UsageError(
          fmt::format("the loss of a Pipeline is {}: it must be a tensor with one element",
                      loss.defined() ? fmt::format("a tensor of shape {}", c10::str(loss.sizes()))
                                     : "undefined"));
    }
    if (!loss.requires_grad()) {
      throw UsageError(
          "the loss of a Pipeline depends on nothing that requires a gradient, so the step would "
          "train nothing: is something detached, or computed without grad mode?");
    }
    one.outputs = {loss / options_.n_microbatches};
    const at::Tensor value = one.outputs.front().detach();
    loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
  });
  if (ddp_ && microbatch == 0) ddp_->after_forward();
  if (!link_.is_last()) {
    link_.send(one.outputs, link_.stage() + 1, subject(Kind::forward, microbatch));
  }
}

void PipelineHandle::Impl::backward(std::int64_t microbatch) {
  Microbatch one = std::exchange(open_[static_cast<std::size_t>(microbatch)], {});
  const Subject about = subject(Kind::backward, microbatch);
  const bool last_of_step = microbatch + 1 == options_.n_microbatches;
  Tensors gradients(one.outputs.size());
  if (!link_.is_last() && std::ranges::any_of(one.outputs, needs_gradient)) {
    gradients = link_.recv(link_.stage() + 1, about);
  }
  record({Kind::backward, microbatch}, [&] {
    if (ddp_ && last_of_step) {
      if (options_.n_microbatches > 1) ddp_->synchronise_backward();
      for (const at::Tensor& output : one.outputs) {
        if (ddp_->watches_outputs()) ddp_->watch_output(output);
      }
    }
    Tensors roots;
    Tensors root_gradients;
    for (std::size_t i = 0; i < one.outputs.size(); ++i) {
      if (!needs_gradient(one.outputs[i])) continue;
      if (!link_.is_last() && !gradients[i].defined()) continue;  // no later stage used it
      roots.push_back(one.outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
  });
  if (link_.is_first() || !std::ranges::any_of(one.inputs, needs_gradient)) return;
  for (at::Tensor& input : one.inputs) {
    if (input.defined()) input = input.grad();
  }
  link_.send(one.inputs, link_.stage() - 1, about);
}

auto PipelineHandle::Impl::evaluate(const Tensors& inputs) -> Tensors {
  const at::NoGradGuard no_grad;
  begin_call({});
  const Batches parts = link_.is_first() ? split(inputs, "the input") : Batches();
  std::vector<Tensors> outputs;  // of each micro-batch, by output
  const auto run = [&](std::int64_t microbatch) {
    Tensors passed = inputs_of(microbatch, parts);
    // No micro-batch, which the later stages get as no tensors.
    const bool is_none =
        microbatch > 0 && (passed.empty() || (link_.is_first() && passed.front().size(0) == 0));
    passed = is_none ? Tensors() : forward_(passed);
    if (!link_.is_last()) {
      return link_.send(passed, link_.stage() + 1, subject(Kind::forward, microbatch));
    }
    if (!is_none) outputs.resize(passed.size());
    for (std::size_t k = 0; k < passed.size(); ++k) {
      if (passed[k].defined()) outputs[k].push_back(passed[k]);
    }
  };
  abort_if_throws([&] {
    for (std::int64_t i = 0; i < options_.n_microbatches; ++i) run(i);
    link_.wait(calls_);
  });
  Tensors whole;
  for (const Tensors& parts_of_output : outputs) {
    whole.push_back(parts_of_output.empty() ? at::Tensor() : at::cat(parts_of_output));
  }
  return whole;
}

void PipelineHandle::Impl::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (!ddp_) throw UsageError("register_comm_hook on a Pipeline without PipelineOptions::ddp");
  ddp_->register_comm_hook(std::move(hook));
}

PipelineHandle::PipelineHandle(torch::nn::Module& stage, Forward forward, Loss loss,
                               const PipelineOptions& options)
    : impl_(std::make_unique<Impl>(stage, std::move(forward), std::move(loss), options)) {}
PipelineHandle::PipelineHandle(PipelineHandle&&) noexcept = default;
PipelineHandle& PipelineHandle::operator=(PipelineHandle&&) noexcept = default;
PipelineHandle::~PipelineHandle() = default;

at::Tensor PipelineHandle::step(const Tensors& inputs, const at::Tensor& target) {
  return impl_->step(inputs, target);
}
auto PipelineHandle::evaluate(const Tensors& inputs) -> Tensors {
  return impl_->evaluate(inputs);
}
void PipelineHandle::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  impl_->register_comm_hook(std::move(hook));
}
const PipelineStats& PipelineHandle::stats() const {
  return impl_->stats();
}

}  // namespace paceline::detail
