#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "internode/engine.h"
#include "internode/group.h"
#include "internode/unmatched_messages.h"
#include "shm/buckets/second_level.h"

namespace paceline::internode {

// The second level of a BucketReducer: the leaders' links gather what the ranks report of a step,
// and an Engine of its own carries the lanes, which are reduced as the Group reduces tensors.
//
// A step that is aborted may leave messages behind whose other ends have not come. So the tags of
// later steps differ, by the *epoch*. The nodes agree on it as they gather reports: it is higher if
// a node has aborted a step and started transfers in the epoch. What is left of an epoch is
// completed beside later steps.
class BucketLevel final : public shm::SecondLevel {
 public:
  // Collective over the group. Like the reducer, it is used by one thread at a time, but no call of
  // the group may be under way during the constructor. Throws like one. A forked child leaks it.
  BucketLevel(std::shared_ptr<Group> group, std::unique_ptr<Engine> engine);
  BucketLevel(const BucketLevel&) = delete;
  BucketLevel& operator=(const BucketLevel&) = delete;
  ~BucketLevel() override;

  const std::vector<int>& ranks() const override { return ranks_; }
  const std::vector<int>& nodes() const override { return nodes_; }
  const std::vector<int>& here() const override { return map().here(); }
  const std::vector<std::vector<int>>& parts() const override { return parts_; }
  int lanes() const override { return map().lanes(); }

  std::unique_ptr<Stage> gather(const Collection& what, std::span<const std::byte> mine,
                                std::shared_ptr<std::byte> all) override;
  std::unique_ptr<Stage> start(const LaneReduction& what,
                               std::shared_ptr<std::byte> buffer) override;
  shm::RankSet silent_leaders() override { return group_->links().silent_leaders(); }
  void abort(std::uint32_t step, const shm::RankSet& at_fault, bool gone) noexcept override;

 private:
  class GatherStage;
  class LaneStage;
  class LaneMemory;

  // What a node's ranks share. Zero-initialised.
  struct Board {
    // Of a step that another node aborted.
    struct Abort {
      shm::Word next_step;             // the one after it; written last
      std::atomic<std::int64_t> from;  // when it counts, on the steady clock
      shm::AtomicRankSet at_fault;
    };
    // By step, modulo their number: a node that throws in every step runs ahead of the others.
    std::array<Abort, 16> aborts;
    shm::Word epoch;
    // By ranks of this node, in the epoch: messages may be left of it if both are set.
    shm::Word aborted;  // a step
    shm::Word started;  // a transfer
  };

  const NodeMap& map() const { return group_->map(); }
  shm::Region& region() const { return *group_->region(); }
  // Rings this rank's doorbell when it is called, on any thread, and sets a flag.
  std::function<void()> ring_and_set(std::shared_ptr<std::atomic<bool>> flag) const;
  void connect_lane();
  void register_for_aborts();
  void unregister();
  Board::Abort& abort_of(std::uint32_t step) const {
    return board_.aborts[step % board_.aborts.size()];
  }
  bool is_aborted(std::uint32_t step) const;
  shm::RankSet at_fault(std::uint32_t step) const;
  void note_abort(const Aborted& aborted);

  std::shared_ptr<Group> group_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<UnmatchedMessages> unmatched_;  // null on a rank without a lane
  std::uint32_t stream_;
  std::vector<int> ranks_;
  std::vector<int> nodes_;
  std::vector<std::vector<int>> parts_;
  std::vector<int> other_nodes_;
  Board& board_;
  std::map<std::size_t, std::shared_ptr<LaneMemory>> memory_;  // by bucket, for its next reduction
};

}  // namespace paceline::internode
