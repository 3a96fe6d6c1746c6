#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/record_stream.h>

#include <memory>
#include <string>
#include <vector>

#include "distributed/bucket_reducer.h"
#include "distributed/devices/streams.h"

namespace paceline::distributed {

// The device of the first bucket on an accelerator; the CPU if there is none.
inline at::Device accelerator_of(const std::vector<BucketReducer::Bucket>& buckets) {
  for (const auto& bucket : buckets) {
    if (!bucket.device.is_cpu()) return bucket.device;
  }
  return at::kCPU;
}

// Buckets on an accelerator. A reducer of the same group on the CPU, the host, carries what ranks
// compare in a step, so errors come in the step in which the ranks differ, and name the ranks.
//
// Gradients become ready for the accelerator's current stream in `publish`; their averages are
// ready for the current stream of the thread that runs `finish`.
class HostedBucketReducer : public BucketReducer {
 public:
  const at::Tensor& tensor(std::size_t bucket) const override { return tensors_[bucket]; }
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override {
    host_->begin_step(summary, weights, frozen);
  }
  void prepare_thread() override { host_->prepare_thread(); }
  bool in_step() const override { return host_->in_step(); }
  std::uint32_t steps() const override { return host_->steps(); }
  const std::vector<Wait>& waits() const override { return host_->waits(); }
  double share() const override { return host_->share(); }
  bool modifications_differ() const override { return host_->modifications_differ(); }
  bool abort_step() override { return host_->abort_step(); }
  bool failed() const override { return host_->failed(); }
  [[noreturn]] void fail(const std::string& text) override {
    host_->fail(text);
    __builtin_unreachable();  // GCC 12 ignores noreturn on a virtual function
  }
  [[noreturn]] void time_out(const std::string& text) override {
    host_->time_out(text);
    __builtin_unreachable();
  }

 protected:
  // The buckets may be in use by the current stream when they are freed, though they were allocated
  // for another.
  void note_stream() {
    for (const at::Tensor& tensor : tensors_) {
      if (!tensor.is_cpu()) tensor.record_stream(current_stream(tensor.device()));
    }
  }

  std::unique_ptr<BucketReducer> host_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace paceline::distributed
