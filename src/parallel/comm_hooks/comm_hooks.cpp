#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <paceline/comm_hooks.h>

#include "parallel/comm_hooks/model_group.h"

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
namespace {

const ProcessGroup& model_group() {
  if (const auto* const group = ModelGroup::current()) return *group;
  throw UsageError(
      "a built-in communication hook without a group was called on a thread where no model runs "
      "its hooks: give the group, as in comm_hooks::all_reduce(group)");
}

c10::intrusive_ptr<c10::ivalue::Future> average(const std::optional<ProcessGroup>& group,
                                                const at::Tensor& tensor) {
  const ProcessGroup& over = group ? *group : model_group();
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  return over.c10d()->getBackend(tensor.device().type())->allreduce(tensors, options)->getFuture();
}

CommHook compress(at::ScalarType type, std::optional<ProcessGroup> group) {
  return [type, group = std::move(group)](c10d::GradBucket& bucket) {
    const at::Tensor& whole = bucket.getBuffer();
    const at::Tensor compressed = whole.to(type);
    return average(group, compressed)
        ->then(
            [whole, compressed](c10::ivalue::Future& sum) {
              if (sum.hasError()) std::rethrow_exception(sum.exception_ptr());
              const at::NoGradGuard no_grad;
              whole.copy_(compressed);
              return c10::IValue(whole);
            },
            c10::TensorType::get());
  };
}

}  // namespace

CommHook all_reduce(std::optional<ProcessGroup> group) {
  return [group = std::move(group)](c10d::GradBucket& bucket) {
    return average(group, bucket.getBuffer());
  };
}

CommHook fp16_compress(std::optional<ProcessGroup> group) {
  return compress(at::kHalf, std::move(group));
}
CommHook bf16_compress(std::optional<ProcessGroup> group) {
  return compress(at::kBFloat16, std::move(group));
}

}  // namespace comm_hooks
}  // namespace paceline
