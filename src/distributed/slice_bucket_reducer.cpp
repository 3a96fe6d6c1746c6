#include "distributed/slice_bucket_reducer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include <paceline/error.h>

#include "distributed/data_type.h"
#include "distributed/process_state.h"
#include "distributed/reported_wait.h"
#include "distributed/translate.h"

namespace paceline::distributed {
namespace {

// What each rank reports of a step. The weights of its leaves follow.
struct ReportHeader {
  shm::StepSummary summary;
  std::uint32_t aborted = 0;
};

constexpr std::int64_t kLine = 64;

const std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.view(at::kByte);
}

}  // namespace

SliceBucketReducer::SliceBucketReducer(ProcessGroup group,
                                       c10::intrusive_ptr<c10d::Backend> backend,
                                       const Options& options)
    : group_(std::move(group)),
      backend_(std::move(backend)),
      leaves_(options.leaves.value_or(shm::LeafPlan(get_world_size(group_)))),
      rank_(get_rank(group_)),
      ranks_(get_world_size(group_)),
      sums_(options.sums),
      step_(options.steps) {
  for (const Bucket& bucket : options.buckets) {
    buckets_.push_back(make_bucket(bucket, options.staged));
  }
  const auto report = static_cast<std::int64_t>(
      sizeof(ReportHeader) + sizeof(double) * static_cast<std::size_t>(leaves_.most_leaves()));
  own_report_ = at::zeros({report}, at::kByte);
  reports_ = at::zeros({ranks_, report}, at::kByte);
  if (backend_) comparison_.emplace(group_, backend_, at::kCPU, options.parameters);
}

SliceBucketReducer::SliceBucket SliceBucketReducer::make_bucket(const Bucket& bucket,
                                                                bool pinned) const {
  const auto type = data_type_of(bucket.type);
  if (!type) {
    throw UsageError(
        fmt::format("a gradient of type {} cannot be averaged over logical ranks; floating and "
                    "complex types except ComplexHalf can",
                    c10::toString(bucket.type)));
  }
  SliceBucket made;
  made.op = bucket.op;
  made.type = *type;
  const auto line = kLine / static_cast<std::int64_t>(c10::elementSize(bucket.type));
  made.slice = (bucket.count + ranks_ * line - 1) / (ranks_ * line) * line;
  // Unused memory stays untouched.
  const auto make = [&](at::IntArrayRef sizes, const at::TensorOptions& options) {
    return bucket.in_place ? at::empty(sizes, options) : at::zeros(sizes, options);
  };
  const auto own_type = at::dtype(bucket.type).pinned_memory(pinned);
  made.padded = make({ranks_ * made.slice}, own_type);
  made.tensor = made.padded.narrow(0, 0, bucket.count);
  made.average = at::empty({made.slice}, at::dtype(bucket.type));
  const bool widens = bucket.op == Op::average && leaves_.part_type(*type) != *type;
  const auto values = widens ? own_type.dtype(at::toOpMathType(bucket.type)) : own_type;
  const std::size_t own = count_parts(bucket.op, rank_);
  for (std::size_t p = 0; p < own; ++p) {
    const bool is_bucket = !widens && p + 1 == own;
    made.padded_parts.push_back(is_bucket ? made.padded : make({ranks_ * made.slice}, values));
    made.parts.push_back(made.padded_parts[p].narrow(0, 0, bucket.count));
  }
  const std::size_t most = bucket.op == Op::average ? leaves_.most_parts() : 1;
  for (std::size_t p = 0; p < most && backend_; ++p) {
    made.received.push_back(at::zeros({ranks_ * made.slice}, values.pinned_memory(false)));
  }
  return made;
}

std::size_t SliceBucketReducer::count_parts(Op op, int rank) const {
  return op == Op::average ? leaves_.parts(rank).size() : 1;
}

void SliceBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                    shm::FrozenFlags frozen) {
  static_cast<void>(group_.c10d());  // throws if the group was destroyed, as not all backends do
  frozen_ = frozen;
  ++step_;
  in_step_ = true;
  aborted_ = reported_ = false;
  sent_ = 0;
  works_.clear();
  for (SliceBucket& bucket : buckets_) {
    bucket.published = false;
    if (!backend_) bucket.places = bucket.parts;
  }
  auto* const report = static_cast<std::byte*>(own_report_.mutable_data_ptr());
  const ReportHeader header{.summary = summary};
  std::memcpy(report, &header, sizeof(header));
  const std::vector<double> ones(static_cast<std::size_t>(leaves_.range(rank_).count), 1.0);
  const Weights own = weights.empty() ? ones : weights;
  std::memcpy(report + sizeof(header), own.data(), own.size_bytes());
}

void SliceBucketReducer::publish(std::size_t bucket) {
  buckets_[bucket].published = true;
  send_published();
}

void SliceBucketReducer::skip(std::size_t bucket) {
  throw UsageError(
      fmt::format("bucket {} cannot be skipped where ranks have several leaves", bucket));
}

void SliceBucketReducer::send_published() {
  for (; sent_ < buckets_.size() && buckets_[sent_].published; ++sent_) {
    for (std::size_t p = 0; p < buckets_[sent_].received.size(); ++p) send(buckets_[sent_], p);
  }
  if (sent_ == buckets_.size()) send_report();
}

// A rank that has fewer parts sends nothing.
void SliceBucketReducer::send(const SliceBucket& bucket, std::size_t part) {
  at::Tensor received = as_bytes(bucket.received[part]);
  const std::int64_t slice = received.numel() / ranks_;
  const bool has_part = part < bucket.padded_parts.size();
  at::Tensor own = has_part ? as_bytes(bucket.padded_parts[part]) : received.narrow(0, 0, 0);
  std::vector<std::int64_t> to(static_cast<std::size_t>(ranks_), has_part ? slice : 0);
  std::vector<std::int64_t> from;
  for (int rank = 0; rank < ranks_; ++rank) {
    from.push_back(part < count_parts(bucket.op, rank) ? slice : 0);
  }
  received = received.narrow(0, 0, std::accumulate(from.begin(), from.end(), std::int64_t{0}));
  translate("all_to_all",
            [&] { works_.push_back(backend_->all_to_all_single(received, own, from, to)); });
}

void SliceBucketReducer::send_report() {
  reported_ = true;
  if (!backend_) {
    reports_[0].copy_(own_report_);
    return;
  }
  at::Tensor all = reports_.flatten();
  translate("all_gather", [&] { works_.push_back(backend_->all_gather_single(all, own_report_)); });
}

void SliceBucketReducer::finish() {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  wait_for_works();
  waits_ = {{.bucket = -1, .rank = -1, .begin = begin, .end = Clock::now()}};
  read_reports();
  const auto gathering = Clock::now();
  reduce_and_gather();
  waits_.push_back({.bucket = -1, .rank = -1, .begin = gathering, .end = Clock::now()});
  in_step_ = false;
}

void SliceBucketReducer::reduce_and_gather() {
  works_.clear();
  for (SliceBucket& bucket : buckets_) {
    if (backend_) {
      reduce(bucket, bucket.average);
      gather(bucket);
    } else {
      const at::Tensor& last = bucket.places.back();
      const bool is_bucket = last.scalar_type() == bucket.tensor.scalar_type();
      reduce(bucket, is_bucket ? last : bucket.tensor);
      bucket.places.clear();
    }
  }
  wait_for_works();
}

void SliceBucketReducer::read_reports() {
  std::vector<shm::StepSummary> summaries;
  weights_.assign(static_cast<std::size_t>(leaves_.leaves()), 0);
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::byte* const report = bytes_of(reports_) + rank * own_report_.numel();
    ReportHeader header;
    std::memcpy(&header, report, sizeof(header));
    if (header.aborted != 0) {
      aborted_ = true;
      const int global = global_rank_of(group_, rank);
      throw Mismatch(fmt::format("rank {} aborted step {}: an exception ended its step before "
                                 "its gradients were ready",
                                 global, step_),
                     {global}, "backward", step_);
    }
    summaries.push_back(header.summary);
    const auto [first, count] = leaves_.range(rank);
    std::memcpy(weights_.data() + first, report + sizeof(header),
                static_cast<std::size_t>(count) * sizeof(double));
  }
  aborted_ = true;  // by all, if this throws
  if (comparison_) comparison_->compare(summaries, frozen_, step_);
  divisor_ = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  if (!(divisor_ > 0) || !std::isfinite(divisor_)) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks_; ++rank) all.push_back(global_rank_of(group_, rank));
    throw Mismatch(
        fmt::format("the ranks' weights add up to {}: there is nothing to average", divisor_), all,
        "backward", step_);
  }
  aborted_ = false;
  if (sums_) divisor_ = 1;
  if (std::ranges::all_of(weights_, [](double weight) { return weight == 1; })) weights_.clear();
}

// This rank's slice of a part of a rank.
const void* SliceBucketReducer::source(const SliceBucket& bucket, int rank,
                                       std::size_t part) const {
  if (!backend_) return bytes_of(bucket.places[part]);
  std::int64_t before = 0;  // ranks that have sent one
  for (int other = 0; other < rank; ++other) {
    if (part < count_parts(bucket.op, other)) ++before;
  }
  const at::Tensor& received = bucket.received[part];
  return bytes_of(received) + before * bucket.slice * received.element_size();
}

// Of as many elements as `result` has.
void SliceBucketReducer::reduce(const SliceBucket& bucket, const at::Tensor& result) const {
  std::array<const void*, shm::kMaxSources> sources;
  const std::array<void*, 1> to{result.mutable_data_ptr()};
  const auto count = static_cast<std::size_t>(result.numel());
  if (bucket.op == Op::max) {
    const auto ranks = static_cast<std::size_t>(ranks_);
    for (int rank = 0; rank < ranks_; ++rank) {
      sources[static_cast<std::size_t>(rank)] = source(bucket, rank, 0);
    }
    return shm::reduce(bucket.type, shm::ReduceOp::max, std::span(sources).first(ranks), to, count);
  }
  std::size_t number = 0;
  for (const auto& [rank, part] : leaves_.sources()) sources[number++] = source(bucket, rank, part);
  leaves_.average(bucket.type, std::span(sources).first(number), weights_, divisor_, to, count);
}

void SliceBucketReducer::gather(SliceBucket& bucket) {
  at::Tensor all = as_bytes(bucket.padded);
  at::Tensor own = as_bytes(bucket.average);
  translate("all_gather", [&] { works_.push_back(backend_->all_gather_single(all, own)); });
}

void SliceBucketReducer::wait_for_works() {
  translate("backward", [&] {
    for (const auto& work : works_) wait_and_report(*work, group_);
  });
}

bool SliceBucketReducer::modifications_differ() const {
  return comparison_ && comparison_->modifications_differ();
}

bool SliceBucketReducer::abort_step() {
  if (!in_step_) return false;
  in_step_ = false;
  if (aborted_ || !backend_) return true;
  if (reported_) {
    wait_for_works();
    try {
      read_reports();
    } catch (const Mismatch&) {
      return true;  // the others throw it too
    }
    reduce_and_gather();  // they do
    throw Error(
        fmt::format("an exception ended the backward of step {} after all its gradients had been "
                    "handed over: the other ranks finished the step, so the models may differ from "
                    "here on",
                    step_));
  }
  auto* const report = static_cast<std::byte*>(own_report_.mutable_data_ptr());
  const std::uint32_t aborted = 1;
  std::memcpy(report + offsetof(ReportHeader, aborted), &aborted, sizeof(aborted));
  for (SliceBucket& bucket : buckets_) bucket.published = true;
  send_published();
  wait_for_works();
  return true;
}

void SliceBucketReducer::fail(const std::string& text) {
  if (backend_) throw Error(text);
  throw Mismatch(text, {global_rank_of(group_, 0)}, "backward", step_);
}

void SliceBucketReducer::time_out(const std::string& text) {
  if (backend_) throw Error(text);
  throw Timeout(text, {global_rank_of(group_, 0)}, "backward", step_);
}

}  // namespace paceline::distributed
