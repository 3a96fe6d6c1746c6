#include "distributed/local_bucket_reducer.h"

#include <ATen/ATen.h>

#include <paceline/error.h>

#include "distributed/process_state.h"

namespace paceline::distributed {

LocalBucketReducer::LocalBucketReducer(ProcessGroup group, const Options& options)
    : group_(std::move(group)),
      buckets_(options.buckets),
      tensors_(buckets_.size()),
      ready_(buckets_.size()),
      step_(options.steps) {}

const at::Tensor& LocalBucketReducer::tensor(std::size_t bucket) const {
  at::Tensor& tensor = tensors_[bucket];
  const Bucket& of = buckets_[bucket];
  if (!tensor.defined()) tensor = at::zeros({of.count}, at::device(of.device).dtype(of.type));
  return tensor;
}

void LocalBucketReducer::begin_step(const shm::StepSummary& /*summary*/, Weights weights,
                                    shm::FrozenFlags /*frozen*/) {
  static_cast<void>(group_.c10d());  // throws if the group was destroyed
  if (!weights.empty() && weights[0] == 0) {
    throw Mismatch("the ranks' weights add up to 0: there is nothing to average",
                   {global_rank_of(group_, 0)}, "backward", step_ + 1);
  }
  ++step_;
  in_step_ = true;
  ready_.assign(buckets_.size(), false);
}

void LocalBucketReducer::fail(const std::string& text) {
  throw Mismatch(text, {global_rank_of(group_, 0)}, "backward", step_);
}

void LocalBucketReducer::time_out(const std::string& text) {
  throw Timeout(text, {global_rank_of(group_, 0)}, "backward", step_);
}

}  // namespace paceline::distributed
