#include "distributed/work_bucket_reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

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

// The last one with the rows.
std::vector<at::Tensor> allocate(const BucketReducer::Options& options, int ranks) {
  const auto& buckets = options.buckets;
  std::vector<at::Tensor> tensors;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto& [count, type, device] =
        std::tie(buckets[b].count, buckets[b].type, buckets[b].device);
    const std::int64_t rows = b + 1 == buckets.size() ? kRow * ranks : 0;
    tensors.push_back(
        at::zeros({count + rows}, at::device(device).dtype(type).pinned_memory(options.staged)));
  }
  return tensors;
}

}  // namespace

WorkBucketReducer::WorkBucketReducer(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                                     const Options& options)
    : group_(std::move(group)),
      backend_(std::move(backend)),
      buckets_(options.buckets),
      reduced_(allocate(options, backend_->getSize())),
      comparison_(group_, backend_, options.buckets.back().device, options.parameters),
      compares_early_(std::ranges::any_of(buckets_, &Bucket::skips)),
      sums_(options.sums),
      share_(sums_ ? 1.0 : 1.0 / backend_->getSize()),
      works_(backend_, buckets_, reduced_, sums_),
      step_(options.steps) {
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    tensors_.push_back(reduced_[b].narrow(0, 0, buckets_[b].count));
  }
  const std::int64_t first = buckets_.back().count;
  rows_ = reduced_.back().narrow(0, first, reduced_.back().numel() - first).view({-1, kRow});
}

void WorkBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                   shm::FrozenFlags frozen) {
  static_cast<void>(group_.c10d());  // throws if the group was destroyed, as not all backends do
  frozen_ = frozen;
  if (compares_early_) compare_early(summary);
  std::optional<double> share;
  if (!sums_ && !weights.empty()) share = share_of(weights[0], *backend_, group_, step_ + 1);
  if (!sums_) share_ = share.value_or(1.0 / backend_->getSize());
  works_.begin_step(share);
  in_step_ = true;
  aborted_ = false;
  ++step_;
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
  if (works_.all_started()) {
    throw Error(
        fmt::format("an exception ended the backward of step {} after all its gradients had been "
                    "handed over: over this backend it is unknown whether other ranks finished the "
                    "step, so the models may differ from here on",
                    step_));
  }
  own_row(rows_)[kAborted] = 1;
  works_.start_rest();
  wait_for_works();
  return true;
}

void WorkBucketReducer::fail(const std::string& text) {
  throw Error(text);
}

void WorkBucketReducer::time_out(const std::string& text) {
  throw Error(text);
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

void WorkBucketReducer::wait_for_works() {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  works_.wait(group_);
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
