#include <paceline/local_sgd.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "parallel/comm_hooks/running_hook.h"

namespace paceline {
namespace {

void require(bool is_right, const char* name, std::int64_t value, const char* allowed) {
  if (!is_right) throw UsageError(fmt::format("{} of {}: it must be {}", name, value, allowed));
}

std::int64_t loaded_count(const at::IValue& value, const char* owner) {
  if (value.isInt() && value.toInt() >= 0) return value.toInt();
  throw Error(
      fmt::format("{}::load_state_dict: the state is no number of steps but a {}; load "
                  "what state_dict returned",
                  owner, value.tagKind()));
}

// Of several types, the sum is in the one that holds all, as in PyTorch.
void average(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  if (!group.is_member()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> used;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    used.push_back(parameter);
    flat.push_back(parameter.reshape(-1));
  }
  if (used.empty()) return;
  const at::Tensor all = at::cat(flat);
  all_reduce(all, {.op = ReduceOp::AVG, .group = group});
  std::int64_t begin = 0;
  for (const at::Tensor& parameter : used) {
    parameter.copy_(all.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
}

}  // namespace

namespace comm_hooks {

struct PostLocalSgdState::Impl {
  PostLocalSgdOptions options;
  std::int64_t iter = 0;
  bool in_step = false;
  bool claimed = false;
};

PostLocalSgdState::PostLocalSgdState(const PostLocalSgdOptions& options)
    : impl_(std::make_shared<Impl>(Impl{options})) {
  require(options.start_local_sgd_iter >= 0, "start_local_sgd_iter", options.start_local_sgd_iter,
          "non-negative");
  if (!options.subgroup && options.post_local_gradient_all_reduce) {
    impl_->options.subgroup = new_subgroups().current;
  }
}

at::IValue PostLocalSgdState::state_dict() const {
  return impl_->iter;
}
void PostLocalSgdState::load_state_dict(const at::IValue& value) {
  impl_->iter = loaded_count(value, "PostLocalSgdState");
}

CommHook post_local_sgd(const PostLocalSgdState& state) {
  if (std::exchange(state.impl_->claimed, true)) {
    throw UsageError(
        "post_local_sgd: this PostLocalSgdState has a hook already; each model needs a state of "
        "its "
        "own");
  }
  return [impl = state.impl_](GradBucket& bucket) -> c10::intrusive_ptr<c10::ivalue::Future> {
    const auto& options = impl->options;
    if (!std::exchange(impl->in_step, true)) {
      RunningHook::require("post_local_sgd").after_last([impl] {
        impl->in_step = false;
        ++impl->iter;
      });
    }
    if (impl->iter < options.start_local_sgd_iter) return all_reduce(options.process_group)(bucket);
    RunningHook::require("post_local_sgd").let_models_differ();
    if (options.post_local_gradient_all_reduce) return all_reduce(options.subgroup)(bucket);
    auto unchanged = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    unchanged->markCompleted(bucket.getBuffer());
    return unchanged;
  };
}

}  // namespace comm_hooks

PeriodicModelAverager::PeriodicModelAverager(const PeriodicModelAveragerOptions& options)
    : options_(options) {
  require(options.period >= 1, "period", options.period, "at least 1");
  require(options.warmup_steps >= 0, "warmup_steps", options.warmup_steps, "non-negative");
}

void PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const std::int64_t after_warmup = step_++ - options_.warmup_steps;
  if (after_warmup >= 0 && after_warmup % options_.period == 0) {
    average(parameters, options_.process_group);
  }
}

void PeriodicModelAverager::load_state_dict(const at::IValue& value) {
  step_ = loaded_count(value, "PeriodicModelAverager");
}

HierarchicalModelAverager::HierarchicalModelAverager(
    const HierarchicalModelAveragerOptions& options)
    : warmup_steps_(options.warmup_steps) {
  require(options.warmup_steps >= 0, "warmup_steps", options.warmup_steps, "non-negative");
  const int ranks = get_world_size();
  std::pair<std::int64_t, int> before{0, 0};
  for (const auto& [period, size] : options.period_group_sizes) {
    if (period <= before.first || size <= before.second || ranks % size != 0) {
      throw UsageError(
          fmt::format("period_group_sizes have period {} with {} ranks, of {}: periods and sizes "
                      "must be positive and ascend, and each size must divide the number of ranks",
                      period, size, ranks));
    }
    before = {period, size};
  }
  if (before.second != ranks) {
    throw UsageError(
        fmt::format("period_group_sizes end with {} ranks: they must end with {}, all "
                    "ranks of the world",
                    before.second, ranks));
  }
  for (const auto& [period, size] : options.period_group_sizes) {
    levels_.emplace_back(period, size == ranks ? ProcessGroup() : new_subgroups(size).current);
  }
}

void HierarchicalModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const std::int64_t step = step_++;
  if (step < warmup_steps_) return;
  for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
    if (step % level->first == 0) return average(parameters, level->second);
  }
}

void HierarchicalModelAverager::load_state_dict(const at::IValue& value) {
  step_ = loaded_count(value, "HierarchicalModelAverager");
}

}  // namespace paceline
