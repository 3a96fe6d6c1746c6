#include <ATen/ATen.h>
#include <fmt/format.h>

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

FuturePtr reduce(const std::optional<ProcessGroup>& group, const at::Tensor& tensor,
                 const c10d::ReduceOp& op) {
  const ProcessGroup& over = group ? *group : model_group();
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return over.c10d()->getBackend(tensor.device().type())->allreduce(tensors, options)->getFuture();
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
    return reduce(group, bucket.getBuffer(), c10d::ReduceOp::AVG);
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
    const int ranks = get_world_size(group ? *group : model_group());
    return then(reduce(group, whole.div_(factor), c10d::ReduceOp::SUM),
                [whole, scale = factor / ranks](const at::Tensor& sum) {
                  if (sum.data_ptr() != whole.data_ptr()) whole.copy_(sum);
                  return whole.mul_(scale);
                });
  };
}

CommHook fp16_compress(std::optional<ProcessGroup> group) {
  return fp16_compress_wrapper(all_reduce(std::move(group)));
}
CommHook bf16_compress(std::optional<ProcessGroup> group) {
  return bf16_compress_wrapper(all_reduce(std::move(group)));
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
