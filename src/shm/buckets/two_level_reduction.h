#pragma once

#include <memory>
#include <vector>

#include "shm/buckets/job_agreement.h"

namespace paceline::shm {

// The reduction of a BucketReducer's buckets where a job has several nodes. A bucket has two
// partitions: in slices, of which each rank of the node accumulates and later completes one, and in
// lanes, of which local rank l exchanges lane l with the other nodes. Nodes may have different
// numbers of ranks, so different slices, while lanes are the same on all.
//
// Of each bucket a rank does three things, each as soon as it can: accumulate its slice of all
// local ranks' buckets into the lanes' buffers; start the exchange of its lane, once all local
// ranks have accumulated; complete its slice, once the lanes are combined, into all local ranks'
// buckets.
class TwoLevelReduction {
 public:
  // By bucket: memory for the sums of this rank's lane; null if that is empty.
  using LaneBuffers = std::vector<std::shared_ptr<std::byte>>;
  // To be called before the ranks exchange control blocks, after which a rank may go on and fail.
  static LaneBuffers allocate(const std::shared_ptr<Region>& region,
                              std::span<const Bucket> buckets, const SecondLevel& between);

  TwoLevelReduction(const ControlBlocks& blocks, StepAgreement& agreement,
                    std::shared_ptr<SecondLevel> between, LaneBuffers buffers);
  TwoLevelReduction(const TwoLevelReduction&) = delete;
  TwoLevelReduction& operator=(const TwoLevelReduction&) = delete;
  // In a forked child it leaves the exchanges alone, which belong to the parent.
  ~TwoLevelReduction();

  // Before the first of this rank's words of the step is written.
  void begin_step();
  void publish(std::size_t bucket) { open_.push_back(bucket); }
  void skip(std::size_t bucket);
  // Wakes the ranks of this node that wait, once the last of them has published a word of a bucket.
  // To be called after this rank has.
  void ring_if_last(std::size_t bucket, Word ControlBlocks::BucketWords::*word) const;
  // Does what can be done at once. Whether an exchange of this rank's is under way, so that it is
  // to be called again soon.
  bool advance();
  // Whether a rank of this node exchanges something of a bucket.
  bool has_lane(int rank, std::size_t bucket) const { return lane_of(bucket, rank).count() > 0; }

  // Cancels what is under way; the step must be aborted then. What other nodes may still write
  // to is not used again. `at_fault` are the ranks of any node that caused it, by their numbers in
  // the world; none means this rank.
  void cancel(RankSet at_fault = {}) noexcept;
  // For a bucket reducer that is destroyed in a step: peers may still write to the buffers.
  void retire();

  // Tells this node's ranks for which ranks of other nodes this one waits.
  void publish_missing();
  // The ranks of other nodes that ranks of this one wait for, by their numbers in the world. For a
  // deadline that was missed: takes up to a second to find out which ranks of this node hang.
  RankSet missing_on_other_nodes();
  // Names ranks of any node with their nodes, by their numbers in the world.
  std::string describe(const RankSet& ranks) const;

 private:
  struct State {
    bool accumulated = false;
    bool combined = false;
    bool completed = false;
    std::unique_ptr<SecondLevel::Stage> stage;
    std::shared_ptr<std::byte> buffer;  // of this rank's lane; null if that is empty
    bool cancelled = false;             // so the buffer is to be replaced
  };

  Slice lane_of(std::size_t bucket, int lane) const;
  void set_buffer(std::size_t bucket, std::shared_ptr<std::byte> buffer);
  bool advance(std::size_t bucket);
  void accumulate(std::size_t bucket);
  void combine(std::size_t bucket);
  void complete(std::size_t bucket);
  bool checks_again(int rank, std::uint32_t seen, const base::Deadline& deadline);
  template <typename Visitor>
  void visit_lanes(std::size_t bucket, Visitor visitor);
  std::string name_of(std::size_t bucket) const;

  const ControlBlocks& blocks_;
  StepAgreement& agreement_;
  std::shared_ptr<SecondLevel> between_;
  JobAgreement job_;
  std::vector<State> states_;      // by bucket
  bool aborted_ = false;           // in this step
  std::vector<std::size_t> open_;  // published here, with something left to do
};

}  // namespace paceline::shm
