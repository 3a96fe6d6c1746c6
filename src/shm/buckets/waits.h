#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shm/buckets/control_blocks.h"
#include "shm/collectives/fingerprint.h"
#include "shm/wait_context.h"

namespace paceline::shm {

class TwoLevelReduction;

// What to do if some ranks go on training while others make another call.
inline constexpr const char* kUnevenAdvice =
    "if the ranks have different numbers of batches, give all the same number "
    "(DistributedSampler), or train inside join, with each model's backward before the next one's "
    "forward; if some ran a forward under no_sync, give all the same number of these; if an "
    "optimizer called a closure more often on some (LBFGS), "
    "return the loss averaged over the ranks; if some have another communication hook or averager, "
    "give all the same; if an exception ended a backward, run a forward next";

// Comes before kUnevenAdvice if a rank has left.
inline constexpr const char* kLeftAdvice = "see the output of a rank that failed";

// Call before a bucket is reduced that all ranks have published. Fails the group if a rank skipped
// it in this step: what it has published is of the next one.
void check_used_by_all(const ControlBlocks& blocks, std::size_t bucket);

// A wait until every rank has set one word of a bucket, or (kGathered) until rank 0 has the other
// nodes' reports.
class BucketWait : public WaitContext {
 public:
  using BucketWord = Word ControlBlocks::BucketWords::*;
  static constexpr BucketWord kGathered = nullptr;

  BucketWait(const ControlBlocks& blocks, CallDeadline& call_deadline, std::size_t bucket,
             BucketWord word, TwoLevelReduction* two_level)
      : WaitContext({"backward", blocks.step()}, call_deadline),
        blocks_(blocks),
        bucket_(bucket),
        word_(word),
        two_level_(two_level) {}
  BucketWait(const BucketWait&) = delete;
  BucketWait& operator=(const BucketWait&) = delete;
  ~BucketWait();

  RankSet missing() const override;
  RankSet missing_on_other_nodes() const override;
  bool may_learn_more() override;
  std::string describe_on_other_nodes(const RankSet& ranks) const override;
  std::string describe() const override;
  // The rank's progress in this step.
  std::string last_seen(int rank, bool missing) const override;
  // Before it has all its buckets ready, a rank is still in its backward.
  bool waits(int rank) const override { return blocks_.has_completed(rank); }
  // Fails the group if the peer skipped the bucket, has left, or waits for this rank in another
  // call or in the backward of another model. Throws Mismatch if it aborted the step, which is no
  // failure of the group: all ranks may abort the step and go on. Words that it set before count,
  // so that all ranks that wait for the same bucket come to the same result.
  void check(int peer) const override;
  bool polls() const override { return two_level_ != nullptr; }
  bool poll() override;

  std::size_t bucket() const { return bucket_; }
  // Whether the wait ends with data from other nodes.
  bool is_for_other_nodes() const;
  // Whether it ends once the rank has the bucket's gradients, or has skipped it.
  bool is_for_gradients() const;
  // The rank's word that this waits for.
  const Word& word(int rank) const;
  bool reached(int rank) const { return Region::reached(word(rank), blocks_.step()); }

 private:
  void check_not_skipped(int peer) const;
  void check_at_fault(int peer, const RankSet& at_fault) const;
  void check_not_in_other_call(int peer, bool left,
                               const std::optional<CollectiveFingerprint>& call) const;
  void check_not_in_other_backward(int peer) const;
  bool is_of_this_thread() const;
  void show() const;
  // The minority: the ranks that have not begun the step, or the ranks that have. All ranks if
  // there is no majority.
  RankSet out_of_step() const;
  // Starts a clock if none runs. Returns whether it has run for a second.
  static bool has_lasted_a_second(std::optional<base::Deadline>& clock);

  const ControlBlocks& blocks_;
  std::size_t bucket_;
  BucketWord word_;
  TwoLevelReduction* two_level_;  // null on the only node
  // When each was seen first.
  mutable std::optional<base::Deadline> other_call_;
  mutable std::optional<base::Deadline> other_backward_;
  // Of ranks that wait for each other and for this one: RankBlock::awaited_looks then.
  using Looks = std::vector<std::pair<int, std::uint64_t>>;
  mutable Looks looks_;
  mutable bool is_shown_ = false;
};

// A wait until every rank has aborted the step.
class AbortWait : public WaitContext {
 public:
  AbortWait(const ControlBlocks& blocks, CallDeadline& call_deadline)
      : WaitContext({"forward", blocks.step()}, call_deadline), blocks_(blocks) {}

  RankSet missing() const override;
  std::string describe() const override;
  // Fails the group if the peer has finished the step.
  void check(int peer) const override;

 private:
  const ControlBlocks& blocks_;
};

}  // namespace paceline::shm
