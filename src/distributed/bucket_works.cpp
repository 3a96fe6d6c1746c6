#include "distributed/bucket_works.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include <paceline/error.h>

#include "distributed/backend.h"
#include "distributed/devices/streams.h"
#include "distributed/reported_wait.h"

namespace paceline::distributed {

BucketWorks::BucketWorks(c10::intrusive_ptr<c10d::Backend> backend, std::vector<Bucket> buckets,
                         std::vector<at::Tensor> tensors, bool sums)
    : backend_(std::move(backend)),
      buckets_(std::move(buckets)),
      reduced_(std::move(tensors)),
      sums_(sums) {}

void BucketWorks::begin_step(std::optional<double> share) {
  share_ = share;
  state_.assign(buckets_.size(), State::open);
  ready_.clear();
  ready_.resize(buckets_.size());
  works_.clear();
}

void BucketWorks::publish(std::size_t bucket) {
  const at::Device device = reduced_[bucket].device();
  if (!device.is_cpu() && works_.size() < bucket) {
    ready_[bucket].emplace(device.type());
    ready_[bucket]->record(current_stream(device));
  }
  settle(bucket, State::published);
}

void BucketWorks::start_rest() {
  while (!all_started()) start();
}

void BucketWorks::settle(std::size_t bucket, State state) {
  state_[bucket] = state;
  while (!all_started() && state_[works_.size()] != State::open) start();
}

void BucketWorks::start() {
  const std::size_t bucket = works_.size();
  if (state_[bucket] == State::skipped) {
    works_.push_back({});
    return;
  }
  if (ready_[bucket]) ready_[bucket]->block(current_stream(reduced_[bucket].device()));
  if (buckets_[bucket].op == BucketReducer::Op::average && !sums_) {
    scale(reduced_[bucket].narrow(0, 0, buckets_[bucket].count));
  }
  std::vector<at::Tensor> tensors{reduced_[bucket]};
  c10d::AllreduceOptions options;
  const bool maximum = buckets_[bucket].op == BucketReducer::Op::max;
  options.reduceOp = maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  translate("all_reduce", [&] { works_.push_back(backend_->allreduce(tensors, options)); });
}

// Before the sum, which would be too large for some half types. The values of a rank of weight 0
// are ignored.
void BucketWorks::scale(const at::Tensor& bucket) const {
  if (!share_) {
    bucket.div_(backend_->getSize());
  } else if (*share_ == 0) {
    bucket.zero_();
  } else {
    bucket.mul_(*share_);
  }
}

void BucketWorks::wait(const ProcessGroup& group) {
  for (std::size_t bucket = 0; bucket < works_.size(); ++bucket) wait(group, bucket);
}

void BucketWorks::wait(const ProcessGroup& group, std::size_t bucket) {
  if (!works_[bucket]) return;
  translate_on(reduced_[bucket].device().type(), *group.c10d(), "backward",
               [&] { wait_and_report(*works_[bucket], group); });
}

double share_of(double weight, c10d::Backend& backend, const ProcessGroup& group,
                std::uint32_t step) {
  std::vector<at::Tensor> total{at::full({1}, weight, at::kDouble)};
  translate("backward", [&] { wait_and_report(*backend.allreduce(total, {}), group); });
  const double sum = total[0].item<double>();
  if (sum > 0 && std::isfinite(sum)) return weight / sum;
  throw Mismatch(fmt::format("the ranks' weights add up to {}: there is nothing to average", sum),
                 {}, "backward", step);
}

}  // namespace paceline::distributed
