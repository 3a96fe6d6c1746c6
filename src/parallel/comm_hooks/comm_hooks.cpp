#include <ATen/ATen.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cmath>

#include <paceline/comm_hooks.h>
#include <paceline/error.h>

#include "parallel/comm_hooks/running_hook.h"

namespace paceline {

std::shared_ptr<c10d::CommHookInterface> detail::make_comm_hook(CommHook hook) {
  class Hook final : public c10d::CppCommHookInterface<CommHook> {
   public:
    using CppCommHookInterface::CppCommHookInterface;
    c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
      return state_(bucket);
    }
  };
  return hook ? std::make_shared<Hook>(std::move(hook)) : nullptr;
}

namespace comm_hooks {

const RunningHook& RunningHook::require(const char* hook) {
  if (current_ != nullptr) return *current_;
  throw UsageError(fmt::format(
      "the hook of {} was called on a thread where no model runs its hooks: pass it to "
      "register_comm_hook, or call it in a hook, on the thread that the hook was called on",
      hook));
}

namespace {

const ProcessGroup& model_group() {
  if (const auto* const running = RunningHook::current()) return running->group();
  throw UsageError(
      "a built-in communication hook without a group was called on a thread where no model runs "
      "its hooks: give the group, as in comm_hooks::all_reduce(group)");
}

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

FuturePtr reduce(c10d::Backend& backend, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return backend.allreduce(tensors, options)->getFuture();
}

// Of the group, by default the model's.
c10d::Backend& backend_of(const std::optional<ProcessGroup>& group, const at::Tensor& tensor) {
  const ProcessGroup& over = group ? *group : model_group();
  return *over.c10d()->getBackend(tensor.device().type());
}

// The average of all ranks' tensors, which are sent as `type`. Divides before the sum, which may be
// too large for a half type. `paceline` adds those in float32, and rounds the average once.
FuturePtr average(const std::optional<ProcessGroup>& group, const at::Tensor& whole,
                  at::ScalarType type) {
  const at::NoGradGuard no_grad;
  c10d::Backend& backend = backend_of(group, whole);
  if (backend.getBackendName() == "paceline") {
    return reduce(backend, whole.to(type), c10d::ReduceOp::AVG);
  }
  return reduce(backend, whole.div_(backend.getSize()).to(type), c10d::ReduceOp::SUM);
}

// Passes the tensor that `future` gets through `change`.
template <typename Change>
FuturePtr then(const FuturePtr& future, Change change) {
  return future->then(
      [change](c10::ivalue::Future& done) {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        const at::NoGradGuard no_grad;
        return c10::IValue(change(c10d::detail::parseCppCommHookResult(done.value())));
      },
      c10::TensorType::get());
}

CommHook compress(at::ScalarType type, std::optional<ProcessGroup> group) {
  return [type, group = std::move(group)](c10d::GradBucket& bucket) {
    const at::Tensor& whole = bucket.getBuffer();
    return then(average(group, whole, type),
                [whole](const at::Tensor& averaged) { return whole.copy_(averaged); });
  };
}

CommHook convert(at::ScalarType type, CommHook hook, const char* name) {
  if (!hook) throw UsageError(fmt::format("{} needs a hook", name));
  return [type, hook = std::move(hook)](c10d::GradBucket& bucket) {
    at::Tensor whole = bucket.getBuffer();
    at::Tensor converted = whole.to(type);
    bucket.setBuffer(converted);
    FuturePtr result = hook(bucket);
    bucket.setBuffer(whole);
    if (!result) return result;
    return then(result, [whole](const at::Tensor& averaged) { return whole.copy_(averaged); });
  };
}

}  // namespace

CommHook all_reduce(std::optional<ProcessGroup> group) {
  return [group = std::move(group)](c10d::GradBucket& bucket) {
    const at::Tensor& whole = bucket.getBuffer();
    return average(group, whole, whole.scalar_type());
  };
}

CommHook predivided_all_reduce(double factor, std::optional<ProcessGroup> group) {
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw UsageError(
        fmt::format("predivided_all_reduce by {}: it must be positive and finite", factor));
  }
  return [factor, group = std::move(group)](c10d::GradBucket& bucket) {
    const at::NoGradGuard no_grad;
    const at::Tensor& whole = bucket.getBuffer();
    c10d::Backend& backend = backend_of(group, whole);
    return then(reduce(backend, whole.div_(factor), c10d::ReduceOp::SUM),
                [whole, scale = factor / backend.getSize()](const at::Tensor& sum) {
                  if (sum.data_ptr() != whole.data_ptr()) whole.copy_(sum);
                  return whole.mul_(scale);
                });
  };
}

CommHook fp16_compress(std::optional<ProcessGroup> group) {
  return compress(at::kHalf, std::move(group));
}
CommHook bf16_compress(std::optional<ProcessGroup> group) {
  return compress(at::kBFloat16, std::move(group));
}

CommHook fp16_compress_wrapper(CommHook hook) {
  return convert(at::kHalf, std::move(hook), "fp16_compress_wrapper");
}
CommHook bf16_compress_wrapper(CommHook hook) {
  return convert(at::kBFloat16, std::move(hook), "bf16_compress_wrapper");
}
CommHook fp32_wrapper(CommHook hook) {
  return convert(at::kFloat, std::move(hook), "fp32_wrapper");
}

}  // namespace comm_hooks
}  // namespace paceline
