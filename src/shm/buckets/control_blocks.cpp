#include "shm/buckets/control_blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace paceline::shm {

ControlBlocks::ControlBlocks(Group& group, std::span<const Bucket> buckets, LeafPlan leaves,
                             const DescribeBucket& describe, std::uint32_t steps,
                             std::vector<std::string> parameters, std::size_t job_ranks)
    : region_(group.region()),
      buckets_(buckets.begin(), buckets.end()),
      leaves_(std::move(leaves)),
      parameters_(std::move(parameters)),
      job_ranks_(job_ranks),
      step_(steps) {
  for (std::size_t b = 0; b < buckets_.size(); ++b) contents_.push_back(describe(b));
  own_ = static_cast<std::byte*>(region_->allocate_or_throw(bytes()));
  std::memset(own_, 0, bytes());
  // Peers read them after the exchange. Zero would seem to be ahead of late steps.
  auto* const own = reinterpret_cast<Progress*>(own_);
  own->aborted = own->finished = own->gathered = step();
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = reinterpret_cast<BucketWords*>(own + 1)[b];
    bucket.published = bucket.reduced = bucket.skipped = step();
    bucket.accumulated = bucket.combined = step();
  }
  if (job_ranks_ != 0) {
    auto* const job = reinterpret_cast<JobBlock*>(own_ + job_block_offset());
    job->missing.step = job->silent.step = job->at_fault.step = step();
  }
  exchange(group);
}

// A peer may have yet to read the words of a step that is finished here, so the control block is
// never reused, small as it is.
ControlBlocks::~ControlBlocks() {
  region_->memory().retire(own_);
}

void ControlBlocks::exchange(Group& group) {
  struct Row {
    std::uint64_t control;
    std::uint64_t buckets;
    std::uint64_t bytes;  // of all of them
    std::uint64_t job_ranks;
    std::uint64_t first_leaf;
    std::uint64_t leaves;  // of this rank
    std::uint64_t all_leaves;
    std::uint64_t parts;  // of all ranks, as this one expects
  };
  constexpr std::size_t kWords = sizeof(Row) / sizeof(std::uint64_t);
  const LeafRange range = leaves_.range(region_->rank());
  Row mine{.control = *region_->memory().shared_offset(own_, 0),
           .buckets = buckets_.size(),
           .bytes = 0,
           .job_ranks = job_ranks_,
           .first_leaf = static_cast<std::uint64_t>(range.first),
           .leaves = static_cast<std::uint64_t>(range.count),
           .all_leaves = static_cast<std::uint64_t>(leaves_.leaves()),
           .parts = leaves_.sources().size()};
  for (const Bucket& bucket : buckets_) mine.bytes += bucket.bytes();
  std::vector<Row> rows(static_cast<std::size_t>(region_->size()));
  std::vector<Output> outputs;
  for (Row& row : rows) outputs.push_back({&row, kWords});
  group.all_gather({&mine, kWords}, outputs, DataType::int64);
  number_ = rows[0].control + 1;

  std::vector<std::string> plans;
  for (const Row& row : rows) {
    plans.push_back(fmt::format("{} {} of {} bytes in all", row.buckets,
                                row.buckets == 1 ? "bucket" : "buckets", row.bytes));
    if (row.job_ranks != 0) plans.back() += fmt::format(" for a job of {} ranks", row.job_ranks);
    if (row.all_leaves != rows.size()) {
      plans.back() += fmt::format(" for {} logical ranks", row.all_leaves);
    }
  }
  for (int rank = 1; rank < region_->size(); ++rank) {
    const std::string& plan = plans[static_cast<std::size_t>(rank)];
    if (plan == plans[0]) continue;
    fail(ranks_in_minority(plans),
         fmt::format("gradients are in {} on {}, and in {} on {}: DistributedDataParallel needs "
                     "the same options on every rank",
                     plans[0], name_of(0), plan, name_of(rank)));
  }
  for (int rank = 0; rank < region_->size(); ++rank) {
    const Row& row = rows[static_cast<std::size_t>(rank)];
    const LeafRange expected = leaves_.range(rank);
    if (row.first_leaf != static_cast<std::uint64_t>(expected.first) ||
        row.leaves != static_cast<std::uint64_t>(expected.count)) {
      fail({rank}, fmt::format("{} runs {} logical ranks from {} on; {} expects {} from {} on: all "
                               "ranks must be given the same ranges",
                               name_of(rank), row.leaves, row.first_leaf, name_of(region_->rank()),
                               expected.count, expected.first));
    }
    if (row.parts != mine.parts) {
      fail({rank}, fmt::format("{} has {} sums of logical ranks, {} has {}: zero_copy must be the "
                               "same on all ranks",
                               name_of(rank), row.parts, name_of(region_->rank()), mine.parts));
    }
    std::byte* const found = region_->memory().resolve(rank, row.control, bytes());
    if (found == nullptr || row.control % kCacheLine != 0) {
      fail({rank}, name_of(rank) + " published memory that is not its own");
    }
    progress_.push_back(reinterpret_cast<Progress*>(found));
  }
}

// Progress, words of each bucket; where ranks have several leaves, their weights and the offsets of
// parts; frozen flags; where there are other nodes, JobBlock and reports.
std::size_t ControlBlocks::bytes() const {
  const std::size_t flags_end = flags_offset() + parameters_.size();
  if (job_ranks_ == 0) return flags_end;
  return job_block_offset() + sizeof(JobBlock) + job_ranks_ * sizeof(RankReport);
}

std::size_t ControlBlocks::flags_offset() const {
  return sizeof(Progress) + buckets_.size() * sizeof(BucketWords) +
         count_leaf_weights() * sizeof(LeafWeight) + count_part_offsets() * sizeof(PartOffset);
}

std::size_t ControlBlocks::job_block_offset() const {
  const std::size_t lines = (flags_offset() + parameters_.size() + kCacheLine - 1) / kCacheLine;
  return lines * kCacheLine;
}

std::size_t ControlBlocks::count_leaf_weights() const {
  return leaves_.one_each() ? 0 : static_cast<std::size_t>(leaves_.most_leaves());
}

std::size_t ControlBlocks::count_part_offsets() const {
  return leaves_.one_each() ? 0 : buckets_.size() * leaves_.most_parts();
}

ControlBlocks::LeafWeight* ControlBlocks::leaf_weights(int rank) const {
  return reinterpret_cast<LeafWeight*>(&words(rank, buckets_.size()));
}

ControlBlocks::PartOffset& ControlBlocks::part_offset(int rank, std::size_t bucket,
                                                      std::size_t part) const {
  auto* const offsets = reinterpret_cast<PartOffset*>(leaf_weights(rank) + count_leaf_weights());
  return offsets[bucket * leaves_.most_parts() + part];
}

ControlBlocks::JobBlock& ControlBlocks::job_block(int rank) const {
  return *reinterpret_cast<JobBlock*>(reinterpret_cast<std::byte*>(&progress(rank)) +
                                      job_block_offset());
}

RankReport* ControlBlocks::reports(int rank) const {
  return reinterpret_cast<RankReport*>(&job_block(rank) + 1);
}

void ControlBlocks::RanksOfStep::store(const RankSet& of_it, std::uint32_t of_step) {
  ranks.store(of_it);
  step.store(of_step, std::memory_order_release);
}

std::optional<RankSet> ControlBlocks::RanksOfStep::load(std::uint32_t of_step) const {
  if (step.load(std::memory_order_acquire) != of_step) return std::nullopt;
  return ranks.load();
}

void ControlBlocks::publish_missing(const RankSet& ranks) const {
  JobBlock& own = job_block(rank());
  own.missing.store(ranks, step());
  own.checks.fetch_add(1, std::memory_order_release);
}

RankSet ControlBlocks::missing_of(int rank) const {
  return job_block(rank).missing.load(step()).value_or(RankSet());
}

void ControlBlocks::publish_silent(const RankSet& leaders) const {
  job_block(rank()).silent.store(leaders, step());
}

RankSet ControlBlocks::silent_leaders() const {
  return job_block(0).silent.load(step()).value_or(RankSet());
}

void ControlBlocks::publish_at_fault(const RankSet& ranks) const {
  job_block(rank()).at_fault.store(ranks, step());
}

std::optional<RankSet> ControlBlocks::at_fault_of(int rank) const {
  return job_block(rank).at_fault.load(step());
}

std::uint8_t* ControlBlocks::frozen_flags(int rank) const {
  return reinterpret_cast<std::uint8_t*>(&progress(rank)) + flags_offset();
}

void ControlBlocks::begin_step(const StepSummary& summary, std::span<const double> weights,
                               FrozenFlags frozen) {
  step_.store(step() + 1, std::memory_order_relaxed);
  // Ranks that have seen a published bucket of this step read these.
  Progress& own = own_progress();
  if (own.frozen.load(std::memory_order_relaxed) != summary.frozen) {
    std::copy_n(frozen.begin(), std::min(frozen.size(), parameters_.size()), frozen_flags(rank()));
  }
  own.forwards.store(summary.forwards, std::memory_order_relaxed);
  own.local_backwards.store(summary.local_backwards, std::memory_order_relaxed);
  own.frozen.store(summary.frozen, std::memory_order_relaxed);
  own.modifications.store(summary.modifications, std::memory_order_relaxed);
  own.joined.store(summary.joined, std::memory_order_relaxed);
  own.weight.store(weights[0], std::memory_order_relaxed);
  for (std::size_t leaf = 1; leaf < weights.size(); ++leaf) {
    leaf_weights(rank())[leaf].store(weights[leaf], std::memory_order_relaxed);
  }
  // Kept near the step; otherwise it would one day seem to be ahead of it.
  own.aborted.store(step() - 1, std::memory_order_release);
}

StepSummary ControlBlocks::summary_of(int rank) const {
  const Progress& said = progress(rank);
  return {.forwards = said.forwards.load(std::memory_order_relaxed),
          .local_backwards = said.local_backwards.load(std::memory_order_relaxed),
          .frozen = said.frozen.load(std::memory_order_relaxed),
          .modifications = said.modifications.load(std::memory_order_relaxed),
          .joined = said.joined.load(std::memory_order_relaxed)};
}

double ControlBlocks::weight_of(int rank, int leaf) const {
  const LeafWeight& weight = leaf == 0 ? progress(rank).weight : leaf_weights(rank)[leaf];
  return weight.load(std::memory_order_relaxed);
}

bool ControlBlocks::reached_by_all(std::size_t bucket, Word BucketWords::*word) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (!reached(rank, bucket, word)) return false;
  }
  return true;
}

// Near the step, as it may be set again after many.
void ControlBlocks::outdate(std::size_t bucket, Word BucketWords::*word) {
  Word& own = own_words(bucket).*word;
  if (own.load(std::memory_order_relaxed) != step() - 1) {
    own.store(step() - 2, std::memory_order_relaxed);
  }
}

bool ControlBlocks::has_settled(int rank, std::size_t bucket) const {
  return reached(rank, bucket, &BucketWords::published) ||
         words(rank, bucket).skipped.load(std::memory_order_acquire) == step();
}

bool ControlBlocks::has_begun(int rank) const {
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (has_settled(rank, bucket)) return true;
  }
  return false;
}

bool ControlBlocks::has_completed(int rank) const {
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!has_settled(rank, bucket)) return false;
  }
  return true;
}

void ControlBlocks::place(std::size_t bucket, const void* memory) {
  own_words(bucket).offset.store(*region_->memory().shared_offset(memory, 0),
                                 std::memory_order_relaxed);
}

void* ControlBlocks::find(int rank, std::size_t bucket) const {
  const auto offset = words(rank, bucket).offset.load(std::memory_order_relaxed);
  return find(rank, bucket, offset, buckets_[bucket].bytes());
}

void ControlBlocks::place_part(std::size_t bucket, std::size_t part, const void* memory) {
  part_offset(rank(), bucket, part)
      .store(*region_->memory().shared_offset(memory, 0), std::memory_order_relaxed);
}

void* ControlBlocks::find_part(int rank, std::size_t bucket, std::size_t part) const {
  const auto offset = part_offset(rank, bucket, part).load(std::memory_order_relaxed);
  const auto& [count, type, op] = buckets_[bucket];
  return find(rank, bucket, offset, count * element_size(leaves_.part_type(type)));
}

void* ControlBlocks::find(int rank, std::size_t bucket, std::uint64_t offset,
                          std::size_t bytes) const {
  void* const found = region_->memory().resolve(rank, offset, bytes);
  if (found == nullptr || offset % kCacheLine != 0) {
    fail({rank}, fmt::format("{} published memory that is not its own as {}", name_of(rank),
                             name_of_bucket(bucket)));
  }
  return found;
}

std::string ControlBlocks::name_of(int rank) const {
  return fmt::format("rank {}", region_->global_ranks().of(rank));
}

std::string ControlBlocks::name_of_bucket(std::size_t bucket) const {
  return fmt::format("bucket {} ({})", bucket, contents_[bucket]);
}

std::string ControlBlocks::position() const {
  return fmt::format("step {} of group {}", step(), region_->options().name);
}

void ControlBlocks::fail(const RankSet& ranks, const std::string& text) const {
  fail({FailureKind::mismatch, region_->global_ranks().of(ranks), text});
}

void ControlBlocks::fail(const Failure& failure) const {
  region_->fail(failure, {"backward", step()});
}

RankSet ControlBlocks::ranks_in_minority(std::span<const std::string> said) const {
  return explain_disagreement(said, region_->global_ranks()).ranks;
}

}  // namespace paceline::shm
