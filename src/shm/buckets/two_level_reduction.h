#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "shm/buckets/job_agreement.h"

namespace paceline::shm {

// The reduction of a BucketReducer's buckets if a job has several nodes. A bucket is partitioned
// twice. Slices: one per local rank, which accumulates it and later completes it. Lanes: local rank
// l exchanges lane l with the other nodes. Slices depend on the number of ranks on a node; lanes
// are the same on all nodes.
//
// A rank does three things with each bucket, each as soon as it can:
// 1. It accumulates its slice of all local ranks' buckets into the lanes' buffers.
// 2. Once all local ranks have accumulated, it starts the exchange of its lane.
// 3. Once the lanes are combined, it completes its slice in all local ranks' buckets.
//
// In a forked child, call nothing and leak it: exchanges, and the locks of other threads, belong to
// the parent.
class TwoLevelReduction {
 public:
  // By bucket: memory for the sums of this rank's lane; null if that is empty.
  using LaneBuffers = std::vector<std::shared_ptr<std::byte>>;
  // Call before the ranks exchange control blocks, since a rank may fail afterwards.
  static LaneBuffers allocate(const std::shared_ptr<Region>& region,
                              std::span<const Bucket> buckets, const SecondLevel& between);

  TwoLevelReduction(const ControlBlocks& blocks, StepAgreement& agreement,
                    std::shared_ptr<SecondLevel> between, LaneBuffers buffers);
  TwoLevelReduction(const TwoLevelReduction&) = delete;
  TwoLevelReduction& operator=(const TwoLevelReduction&) = delete;

  // Call before this rank writes its first word of the step.
  void begin_step();
  // May be called while another thread calls advance().
  void publish(std::size_t bucket);
  // Call after this rank has published a word of a bucket. If it was the node's last, wakes what
  // waits for it: the other ranks, and this one's StepProgress.
  void ring_if_last(std::size_t bucket, Word ControlBlocks::BucketWords::*word) const;
  // Makes progress without waiting. Returns whether to call again soon, since an exchange of this
  // rank is under way that does not ring.
  bool advance();
  // Whether `rank`, of this node, has a non-empty lane of the bucket.
  bool has_lane(int rank, std::size_t bucket) const { return lane_of(bucket, rank).count() > 0; }

  // Cancels the exchanges under way; the step must be aborted then. Replaces buffers that the
  // transport may still write to. `at_fault`: the global ranks that caused it, none if unknown.
  // By default those of the group's failure, or else this rank.
  // `gone`: as in SecondLevel::abort.
  void cancel(bool gone = false) noexcept;
  void cancel(const RankSet& at_fault, bool gone = false) noexcept;
  // Call if the bucket reducer is destroyed in a step: peers may still write to the buffers.
  void retire();

  // Call while this rank waits, from time to time. Fails the group if other nodes never come.
  // Publishes, for this node's ranks, the ranks on other nodes that this rank waits for.
  void check_other_nodes();
  // Call when the next wait gets a new deadline.
  void restart_deadline();
  // Returns true for one second past the deadline of a wait for other nodes, unless one of the
  // local ranks `missing` hangs. In that second a node that knows which rank is late reports it.
  bool may_learn_more(const RankSet& missing);
  // Global ranks on other nodes for which ranks of this node wait that do not hang.
  RankSet missing_on_other_nodes() const;
  // Names global ranks of any node, with their nodes; "an unknown rank" if there is none.
  std::string describe(const RankSet& ranks) const;

 private:
  struct State {
    bool accumulated = false;
    bool combined = false;
    bool completed = false;
    std::unique_ptr<SecondLevel::Stage> stage;
    std::shared_ptr<std::byte> buffer;  // of this rank's lane; null if that is empty
    bool cancelled = false;             // the next step needs a new buffer
  };

  struct Checks {
    std::uint32_t count;
    base::Deadline::Clock::time_point since;
  };

  void note_checks();
  bool hangs(int rank) const;
  // The global ranks of the node of one of them.
  RankSet node_of(int global_rank) const;
  Slice lane_of(std::size_t bucket, int lane) const;
  void set_buffer(std::size_t bucket, std::shared_ptr<std::byte> buffer);
  bool advance(std::size_t bucket);
  void accumulate(std::size_t bucket);
  void accumulate(std::size_t bucket, std::span<const int> ranks, const Slice& slice,
                  std::byte* sums);
  void combine(std::size_t bucket);
  void complete(std::size_t bucket);
  template <typename Visitor>
  void visit_lanes(std::size_t bucket, Visitor visitor);

  const ControlBlocks& blocks_;
  StepAgreement& agreement_;
  std::shared_ptr<SecondLevel> between_;
  JobAgreement job_;
  std::vector<State> states_;  // by bucket
  bool aborted_ = false;       // in this step
  std::mutex published_mutex_;
  std::vector<std::size_t> published_;  // since the last advance()
  std::vector<std::size_t> open_;       // published before it, with something left to do
  std::vector<Checks> checks_;          // by rank of this node, as seen in this wait
  base::Deadline::Clock::time_point noted_checks_{};
  std::optional<base::Deadline> learning_;
};

}  // namespace paceline::shm
