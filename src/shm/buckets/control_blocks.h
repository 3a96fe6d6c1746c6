#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shm/buckets/step_summary.h"
#include "shm/collectives/group.h"

namespace paceline::shm {

struct Bucket {
  std::size_t count;
  DataType type;
  ReduceOp op;

  std::size_t bytes() const { return count * element_size(type); }
};
// Names what is in a bucket, for messages: "fc.weight and fc.bias".
using DescribeBucket = std::function<std::string(std::size_t bucket)>;

// What the ranks of a bucket reducer tell each other in shared memory, each in a control block of
// its own in its arena, and which step this rank is in. docs/shm-protocol.md tells who writes a
// word when.
class ControlBlocks {
 public:
  struct alignas(kCacheLine) Progress {
    Word aborted;   // the last step aborted, or the one before the current
    Word finished;  // the last step finished
    Word last;      // the bucket published last
    Word gone;      // 1 if the reducer was destroyed in the aborted step
    std::atomic<double> weight;
    // StepSummary's.
    Word forwards;
    Word local_backwards;
    Word frozen;
    Word modifications;
    Word joined;
    // Where a job has several nodes.
    Word gathered;  // by rank 0: the last step of which its `reports` are there
  };
  static_assert(sizeof(Progress) == kCacheLine);
  struct alignas(kCacheLine) BucketWords {
    Word published;
    Word reduced;
    Word skipped;                            // the last step in which it was
    Word accumulated;                        // several nodes: this rank's slice
    std::atomic<std::uint64_t> offset;       // the bucket's offset in the published step
    std::atomic<std::uint64_t> lane_offset;  // the offset of this rank's lane sums
    Word combined;                           // this rank's lane
  };
  static_assert(Word::is_always_lock_free && std::atomic<double>::is_always_lock_free &&
                std::atomic<std::uint64_t>::is_always_lock_free);

  // Collective. Mismatch if the ranks have different buckets. `job_ranks`: how many ranks the nodes
  // of the job have; 0 if this is the only node.
  ControlBlocks(Group& group, std::span<const Bucket> buckets, DescribeBucket describe,
                std::uint32_t steps, std::vector<std::string> parameters,
                std::size_t job_ranks = 0);
  ControlBlocks(const ControlBlocks&) = delete;
  ControlBlocks& operator=(const ControlBlocks&) = delete;
  ~ControlBlocks();

  Region& region() const { return *region_; }
  const std::shared_ptr<Region>& shared_region() const { return region_; }
  int size() const { return static_cast<int>(progress_.size()); }
  int rank() const { return region_->rank(); }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::vector<std::string>& parameters() const { return parameters_; }

  std::uint32_t step() const { return step_; }
  // Begins the next step with what this rank says of it.
  void begin_step(const StepSummary& summary, double weight, FrozenFlags frozen);

  Progress& progress(int rank) const { return *progress_[static_cast<std::size_t>(rank)]; }
  Progress& own_progress() const { return progress(rank()); }
  BucketWords& words(int rank, std::size_t bucket) const {
    return reinterpret_cast<BucketWords*>(&progress(rank) + 1)[bucket];
  }
  BucketWords& own_words(std::size_t bucket) const { return words(rank(), bucket); }
  std::uint8_t* frozen_flags(int rank) const;
  StepSummary summary_of(int rank) const;
  // Of a job of several nodes, once rank 0 has `gathered` them.
  RankReport* reports(int rank) const;
  // The ranks of other nodes that a rank waits for, by their numbers in the world; none before it
  // publishes them in this step. It does so whenever it checks its peers; a rank that hangs does
  // not any more.
  void publish_missing(const RankSet& ranks) const;
  RankSet missing_of(int rank) const;
  // How often a rank has published the ranks that it waits for.
  const Word& checks(int rank) const { return job_block(rank).checks; }
  // The ranks, of any node, because of which a rank aborts this step. To be published before
  // `aborted`.
  void publish_at_fault(const RankSet& ranks) const;
  RankSet at_fault_of(int rank) const;
  // Whether a rank, or every rank, has a word of a bucket at the current step.
  bool reached(int rank, std::size_t bucket, Word BucketWords::*word) const {
    return Region::reached(words(rank, bucket).*word, step_);
  }
  bool reached_by_all(std::size_t bucket, Word BucketWords::*word) const;
  // Whether a rank has published or skipped a bucket in this step: then its summary is there.
  bool has_begun(int rank) const;

  // Says where this rank's bucket lies in this step.
  void place(std::size_t bucket, const void* memory);
  // A rank's bucket, once it is published.
  void* find(int rank, std::size_t bucket) const;

  // For messages: "rank 3", "step 7 of group world", "fc.weight".
  std::string name_of(int rank) const;
  std::string position() const;
  std::string describe(std::size_t bucket) const { return describe_(bucket); }
  // Makes `text` the group's failure, with ranks of the group, or of the world, at fault.
  [[noreturn]] void fail(const RankSet& ranks, const std::string& text) const;
  [[noreturn]] void fail(const Failure& failure) const;
  // The ranks that differ from the majority; all ranks if there is none.
  RankSet ranks_in_minority(std::span<const std::string> said) const;

 private:
  // Ranks that a rank publishes for a step.
  struct RanksOfStep {
    std::array<std::atomic<std::uint64_t>, RankSet::Words().size()> words;
    Word step;  // the last in which they were written

    void store(const RankSet& ranks, std::uint32_t of_step);
    RankSet load(std::uint32_t of_step) const;
  };
  // What a job of several nodes adds to a control block, before the reports.
  struct alignas(kCacheLine) JobBlock {
    RanksOfStep missing;
    RanksOfStep at_fault;
    Word checks;
  };

  void exchange(Group& group);
  std::size_t job_block_offset() const;
  JobBlock& job_block(int rank) const;
  std::size_t bytes() const;

  std::shared_ptr<Region> region_;
  std::vector<Bucket> buckets_;
  DescribeBucket describe_;
  std::vector<std::string> parameters_;
  std::byte* own_ = nullptr;
  std::vector<Progress*> progress_;  // by rank
  std::size_t job_ranks_;
  std::uint32_t step_;
};

}  // namespace paceline::shm
