#pragma once

#include <optional>
#include <string>

#include "shm/buckets/control_blocks.h"
#include "shm/collectives/fingerprint.h"
#include "shm/wait_context.h"

namespace paceline::shm {

class TwoLevelReduction;

// A wait for a word of a bucket, on every rank; or for what rank 0 gathers from other nodes before
// a bucket is reduced.
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

  RankSet missing() const override;
  RankSet missing_on_other_nodes() const override;
  std::string describe_on_other_nodes(const RankSet& ranks) const override;
  std::string describe() const override;
  // How far the rank has come in this step.
  std::string last_seen(int rank, bool missing) const override;
  // Not a failure of the group: all ranks may abort the step together and go on. What the peer did
  // before it aborted counts, so that all ranks that wait for the same bucket come to the same
  // result.
  void check(int peer) const override;
  bool polls() const override { return two_level_ != nullptr; }
  bool poll() override;

  std::size_t bucket() const { return bucket_; }
  // Whether the word says that something has come from other nodes.
  bool is_for_other_nodes() const;
  // Of a rank.
  const Word& word(int rank) const;
  bool reached(int rank) const { return Region::reached(word(rank), blocks_.step()); }

 private:
  void check_not_skipped(int peer) const;
  void check_at_fault(int peer) const;
  void check_not_in_other_call(int peer, bool left,
                               const std::optional<CollectiveFingerprint>& call) const;
  RankSet out_of_step() const;
  bool has_lasted_a_second() const;

  const ControlBlocks& blocks_;
  std::size_t bucket_;
  BucketWord word_;
  TwoLevelReduction* two_level_;  // null on the only node
  mutable std::optional<base::Deadline> first_seen_;
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
