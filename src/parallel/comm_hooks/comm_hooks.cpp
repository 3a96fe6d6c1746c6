#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <paceline/comm_hooks.h>

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

c10::intrusive_ptr<c10::ivalue::Future> average(const ProcessGroup& group,
                                                const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  return group.c10d()->getBackend(tensor.device().type())->allreduce(tensors, options)->getFuture();
}

CommHook compress(at::ScalarType type, ProcessGroup group) {
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

CommHook all_reduce(ProcessGroup group) {
  return [group = std::move(group)](c10d::GradBucket& bucket) {
    return average(group, bucket.getBuffer());
  };
}

CommHook fp16_compress(ProcessGroup group) {
  return compress(at::kHalf, std::move(group));
}
CommHook bf16_compress(ProcessGroup group) {
  return compress(at::kBFloat16, std::move(group));
}

}  // namespace comm_hooks
}  // namespace paceline
