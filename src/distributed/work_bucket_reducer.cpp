#include "distributed/work_bucket_reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <paceline/error.h>

#include "distributed/process_state.h"
#include "distributed/reported_wait.h"
#include "distributed/translate.h"

namespace paceline::distributed {
namespace {

// What a row has: an element for each byte of the summary, since 0 to 255 are exact in all types of
// gradients; and one that a rank sets to abort the step.
constexpr std::int64_t kAborted = sizeof(shm::StepSummary);
constexpr std::int64_t kRow = kAborted + 1;

at::Tensor row_of(const shm::StepSummary& summary) {
  at::Tensor row = at::zeros({kRow}, at::kByte);
  std::memcpy(row.data_ptr(), &summary, sizeof(summary));
  return row;
}

}  // namespace

WorkBucketReducer::WorkBucketReducer(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                                     const Options& options)
    : group_(std::move(group)),
      backend_(std::move(backend)),
      buckets_(options.buckets),
      comparison_(group_, backend_, options.buckets.back().device, options.parameters),
      compares_early_(std::ranges::any_of(buckets_, &Bucket::skips)),
      state_(buckets_.size()),
      sums_(options.sums),
      share_(sums_ ? 1.0 : 1.0 / backend_->getSize()),
      step_(options.steps) {
  const std::int64_t rows = kRow * backend_->getSize();
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const std::int64_t flags = b + 1 == buckets_.size() ? rows : 0;
    reduced_.push_back(at::zeros({buckets_[b].count + flags},
                                 at::device(buckets_[b].device).dtype(buckets_[b].type)));
    tensors_.push_back(reduced_[b].narrow(0, 0, buckets_[b].count));
  }
  rows_ = reduced_.back().narrow(0, buckets_.back().count, rows).view({-1, kRow});
}

void WorkBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                   shm::FrozenFlags frozen) {
  static_cast<void>(group_.c10d());  // throws if the group was destroyed, as not all backends do
  frozen_ = frozen;
  if (compares_early_) compare_early(summary);
  weighted_ = !weights.empty();
  if (!sums_) share_ = weighted_ ? weights[0] / total_of(weights[0]) : 1.0 / backend_->getSize();
  in_step_ = true;
  aborted_ = false;
  ++step_;
  state_.assign(buckets_.size(), State::open);
  works_.clear();
  rows_.zero_();
  own_row(rows_).copy_(row_of(summary));
}

void WorkBucketReducer::finish() {
  wait_for_works();
  const at::Tensor rows =
      (rows_.is_complex() ? at::real(rows_) : rows_).to(at::kCPU, at::kByte).contiguous();
  check_nobody_aborted(rows);
  compare_summaries(rows, step_);
  in_step_ = false;
}

bool WorkBucketReducer::abort_step() {
  if (!in_step_) return false;
  in_step_ = false;
  if (aborted_) return true;
  if (works_.size() == buckets_.size()) {
    throw Error(
        fmt::format("an exception ended the backward of step {} after all its gradients had been "
                    "handed over: over this backend it is unknown whether other ranks finished the "
                    "step, so the models may differ from here on",
                    step_));
  }
  own_row(rows_)[kAborted] = 1;
  while (works_.size() < buckets_.size()) start();
  wait_for_works();
  return true;
}

void WorkBucketReducer::fail(const std::string& text) {
  throw Error(text);
}

void WorkBucketReducer::time_out(const std::string& text) {
  throw Error(text);
}

double WorkBucketReducer::total_of(double weight) {
  std::vector<at::Tensor> total{at::full({1}, weight, at::kDouble)};
  translate("backward", [&] { wait_and_report(*backend_->allreduce(total, {}), group_); });
  const double sum = total[0].item<double>();
  if (sum > 0 && std::isfinite(sum)) return sum;
  throw Mismatch(fmt::format("the ranks' weights add up to {}: there is nothing to average", sum),
                 {}, "backward", step_ + 1);
}

// Ranks that skip different buckets could not even reduce the last one together.
void WorkBucketReducer::compare_early(const shm::StepSummary& summary) {
  const auto options = at::device(buckets_.back().device).dtype(at::kByte);
  const at::Tensor rows = at::zeros({backend_->getSize(), kRow}, options);
  own_row(rows).copy_(row_of(summary));
  std::vector<at::Tensor> tensors{rows};
  c10d::AllreduceOptions all_reduce;
  all_reduce.reduceOp = c10d::ReduceOp::MAX;
  translate("backward",
            [&] { wait_and_report(*backend_->allreduce(tensors, all_reduce), group_); });
  compare_summaries(rows.cpu(), step_ + 1);
}

// `rows` are the same on every rank.
void WorkBucketReducer::compare_summaries(const at::Tensor& rows, std::uint32_t step) {
  std::vector<shm::StepSummary> all(static_cast<std::size_t>(backend_->getSize()));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::memcpy(&all[rank], rows.data_ptr<std::uint8_t>() + rank * kRow, sizeof(all[rank]));
  }
  aborted_ = true;  // by all, if this throws
  comparison_.compare(all, frozen_, step);
  aborted_ = false;
}

void WorkBucketReducer::settle(std::size_t bucket, State state) {
  state_[bucket] = state;
  while (works_.size() < buckets_.size() && state_[works_.size()] != State::open) start();
}

void WorkBucketReducer::start() {
  const std::size_t bucket = works_.size();
  if (state_[bucket] == State::skipped) {
    works_.push_back({});
    return;
  }
  if (buckets_[bucket].op == Op::average && !sums_) scale(tensors_[bucket]);
  std::vector<at::Tensor> tensors{reduced_[bucket]};
  c10d::AllreduceOptions options;
  options.reduceOp = buckets_[bucket].op == Op::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  translate("all_reduce", [&] { works_.push_back(backend_->allreduce(tensors, options)); });
}

// Before the sum, which would be too large for some half types. The values of a rank of weight 0
// are ignored.
void WorkBucketReducer::scale(const at::Tensor& tensor) const {
  if (!weighted_) {
    tensor.div_(backend_->getSize());
  } else if (share_ == 0) {
    tensor.zero_();
  } else {
    tensor.mul_(share_);
  }
}

void WorkBucketReducer::wait_for_works() {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  translate("backward", [&] {
    for (const auto& work : works_) {
      if (work) wait_and_report(*work, group_);
    }
  });
  waits_ = {{.bucket = -1, .rank = -1, .begin = begin, .end = Clock::now()}};
}

void WorkBucketReducer::check_nobody_aborted(const at::Tensor& rows) {
  const at::Tensor ranks = rows.select(1, kAborted).nonzero();
  if (ranks.numel() == 0) return;
  aborted_ = true;
  const int rank = global_rank_of(group_, static_cast<int>(ranks[0][0].item<std::int64_t>()));
  throw Mismatch(fmt::format("rank {} aborted step {}: an exception ended its step before its "
                             "gradients were ready",
                             rank, step_),
                 {rank}, "backward", step_);
}

}  // namespace paceline::distributed
