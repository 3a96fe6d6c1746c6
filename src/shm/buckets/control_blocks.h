#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/buckets/leaf_plan.h"
#include "shm/buckets/step_summary.h"
#include "shm/collectives/group.h"

namespace paceline::shm {

struct Bucket {
  std::size_t count;
  DataType type;
  ReduceOp op;

  std::size_t bytes() const { return count * element_size(type); }
};
// The content of a bucket, for messages: "fc.weight, fc.bias".
using DescribeBucket = std::function<std::string(std::size_t bucket)>;

// What the ranks of a bucket reducer publish in shared memory: each has a control block in its
// arena. Also the step that this rank is in. docs/shm-protocol.md lists who writes a word and when.
class ControlBlocks {
 public:
  struct alignas(kCacheLine) Progress {
    Word aborted;                // the last step aborted, or the one before the current
    Word finished;               // the last step finished
    Word last;                   // the bucket published last
    Word gone;                   // 1 if the reducer was destroyed in the aborted step
    std::atomic<double> weight;  // of its first leaf
    // The fields of StepSummary.
    Word forwards;
    Word local_backwards;
    Word frozen;
    Word modifications;
    Word joined;
    // Several nodes only. Written by rank 0: the last step whose `reports` are complete.
    Word gathered;
  };
  static_assert(sizeof(Progress) == kCacheLine);
  struct alignas(kCacheLine) BucketWords {
    Word published;
    Word reduced;
    Word skipped;      // the last step in which this bucket was skipped
    Word accumulated;  // several nodes: the last step in which this rank accumulated its slice
    std::atomic<std::uint64_t> offset;       // of the bucket, in the published step
    std::atomic<std::uint64_t> lane_offset;  // the offset of the sums of this rank's lane
    Word combined;  // several nodes: the last step in which this rank's lane was reduced
  };
  static_assert(Word::is_always_lock_free && std::atomic<double>::is_always_lock_free &&
                std::atomic<std::uint64_t>::is_always_lock_free);

  // Collective. Mismatch if the ranks have different buckets or leaves. `job_ranks`: the number of
  // ranks in the job; 0 on a single node.
  ControlBlocks(Group& group, std::span<const Bucket> buckets, LeafPlan leaves,
                const DescribeBucket& describe, std::uint32_t steps,
                std::vector<std::string> parameters, std::size_t job_ranks = 0);
  ControlBlocks(const ControlBlocks&) = delete;
  ControlBlocks& operator=(const ControlBlocks&) = delete;
  ~ControlBlocks();

  Region& region() const { return *region_; }
  const std::shared_ptr<Region>& shared_region() const { return region_; }
  int size() const { return static_cast<int>(progress_.size()); }
  int rank() const { return region_->rank(); }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const LeafPlan& leaves() const { return leaves_; }
  const std::vector<std::string>& parameters() const { return parameters_; }

  // The same on all ranks, and not 0. The group's other bucket reducers have others.
  std::uint64_t number() const { return number_; }
  // May be called from any thread; so may what only reads words of the ranks.
  std::uint32_t step() const { return step_.load(std::memory_order_relaxed); }
  // Begins the next step and publishes this rank's values for it. `weights`: of its leaves.
  void begin_step(const StepSummary& summary, std::span<const double> weights, FrozenFlags frozen);

  Progress& progress(int rank) const { return *progress_[static_cast<std::size_t>(rank)]; }
  Progress& own_progress() const { return progress(rank()); }
  BucketWords& words(int rank, std::size_t bucket) const {
    return reinterpret_cast<BucketWords*>(&progress(rank) + 1)[bucket];
  }
  BucketWords& own_words(std::size_t bucket) const { return words(rank(), bucket); }
  std::uint8_t* frozen_flags(int rank) const;
  StepSummary summary_of(int rank) const;
  // Of one of a rank's leaves, from 0.
  double weight_of(int rank, int leaf) const;
  // Several nodes only: the reports of all ranks of the job. Valid once rank 0 has `gathered` them.
  RankReport* reports(int rank) const;
  // The global ranks on other nodes that a rank waits for; none before it publishes them in this
  // step. A waiting rank publishes them whenever it checks its peers. A hung rank stops publishing
  // them.
  void publish_missing(const RankSet& ranks) const;
  RankSet missing_of(int rank) const;
  // The same for the leaders of other nodes that do not run; only rank 0 publishes them.
  void publish_silent(const RankSet& leaders) const;
  RankSet silent_leaders() const;
  // How often a rank has called publish_missing.
  const Word& checks(int rank) const { return job_block(rank).checks; }
  // The global ranks that made a rank abort this step, none if unknown. Publish them before
  // `aborted`.
  void publish_at_fault(const RankSet& ranks) const;
  std::optional<RankSet> at_fault_of(int rank) const;
  // Whether a word of a bucket has reached the current step, on a rank or on every rank.
  bool reached(int rank, std::size_t bucket, Word BucketWords::*word) const {
    return Region::reached(words(rank, bucket).*word, step());
  }
  bool reached_by_all(std::size_t bucket, Word BucketWords::*word) const;
  // For a word of a bucket that this rank does not set in this step: makes sure that it has not
  // reached the step before, in which a slower rank may be. If it was set there, that rank may
  // still need it.
  void outdate(std::size_t bucket, Word BucketWords::*word);
  // Whether a rank has published or skipped a bucket in this step: then its summary can be read.
  bool has_begun(int rank) const;
  // Whether a rank has published or skipped all buckets in this step.
  bool has_completed(int rank) const;

  // Sets where this rank's bucket is stored in this step.
  void place(std::size_t bucket, const void* memory);
  // A rank's bucket. Call once it is published.
  void* find(int rank, std::size_t bucket) const;
  // The same for a part of the bucket, where ranks have several leaves.
  void place_part(std::size_t bucket, std::size_t part, const void* memory);
  void* find_part(int rank, std::size_t bucket, std::size_t part) const;

  // For messages: "rank 3", "step 7 of group world", "fc.weight", "bucket 2 (fc.weight)".
  std::string name_of(int rank) const;
  std::string position() const;
  const std::vector<std::string>& contents() const { return contents_; }  // by bucket
  std::string name_of_bucket(std::size_t bucket) const;
  // Makes `text` the group's failure. `ranks`: the ranks of the group at fault.
  [[noreturn]] void fail(const RankSet& ranks, const std::string& text) const;
  [[noreturn]] void fail(const Failure& failure) const;
  // The ranks that differ from the majority; all ranks if there is none.
  RankSet ranks_in_minority(std::span<const std::string> said) const;

 private:
  // Ranks that a rank publishes for a step.
  struct RanksOfStep {
    AtomicRankSet ranks;
    Word step;  // the last in which they were written

    void store(const RankSet& of_it, std::uint32_t of_step);
    std::optional<RankSet> load(std::uint32_t of_step) const;
  };
  // What a job of several nodes adds to a control block, before the reports.
  struct alignas(kCacheLine) JobBlock {
    RanksOfStep missing;
    RanksOfStep silent;
    RanksOfStep at_fault;
    Word checks;
  };

  // What ranks with several leaves add to a control block, after the words of the buckets.
  using LeafWeight = std::atomic<double>;         // one for each leaf of the rank
  using PartOffset = std::atomic<std::uint64_t>;  // then by bucket and part

  bool has_settled(int rank, std::size_t bucket) const;
  void exchange(Group& group);
  std::size_t count_leaf_weights() const;
  std::size_t count_part_offsets() const;
  std::size_t flags_offset() const;
  LeafWeight* leaf_weights(int rank) const;
  PartOffset& part_offset(int rank, std::size_t bucket, std::size_t part) const;
  void* find(int rank, std::size_t bucket, std::uint64_t offset, std::size_t bytes) const;
  std::size_t job_block_offset() const;
  JobBlock& job_block(int rank) const;
  std::size_t bytes() const;

  std::shared_ptr<Region> region_;
  std::vector<Bucket> buckets_;
  LeafPlan leaves_;
  std::vector<std::string> contents_;  // by bucket
  std::vector<std::string> parameters_;
  std::byte* own_ = nullptr;
  std::vector<Progress*> progress_;  // by rank
  std::size_t job_ranks_;
  std::uint64_t number_ = 0;
  std::atomic<std::uint32_t> step_;  // written by the thread that uses the reducer
};

}  // namespace paceline::shm
