#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shm/buckets/step_summary.h"

namespace paceline::shm {

// How the nodes of a job exchange what the ranks of each have reduced: the second level of a
// BucketReducer. Every rank of every node has one, made for its bucket reducer; all of them
// together serve that one reducer. Its methods are called by the thread that uses the reducer, and
// never wait.
class SecondLevel {
 public:
  // An exchange between nodes that is under way.
  class Stage {
   public:
    enum class State { under_way, complete, aborted };

    // After cancel, or when it is complete, a stage may be destroyed at any time.
    virtual ~Stage() = default;
    // Throws if the exchange has failed: a PeerError that names ranks, where they are known.
    // `aborted` if another node cancelled its part, or has gone on to a later step without one.
    virtual State poll() = 0;
    // Gives the exchange up. It is not polled again.
    virtual void cancel() noexcept = 0;
    // The global ranks that it waits for.
    virtual RankSet awaited() const = 0;
    // Once it is aborted: the global ranks at fault, as the nodes that aborted it named them.
    virtual RankSet at_fault() const = 0;
  };

  virtual ~SecondLevel() = default;

  // The ranks of the job, by their numbers in the world.
  virtual const std::vector<int>& ranks() const = 0;
  // The node of each of `ranks`.
  virtual const std::vector<int>& nodes() const = 0;
  // Which of `ranks` this node's ranks are, by local rank.
  virtual const std::vector<int>& here() const = 0;
  // Into how many parts buckets are divided between nodes; the same on all, and no more than any
  // node has ranks. Local rank l starts the stages of lane l.
  virtual int lanes() const = 0;

  // Of local rank 0: collects as many bytes of each rank. `mine` has those of this node's ranks, in
  // order, and is read before this returns; `all` receives those of all `ranks`, in order, and is
  // kept as long as anything may write to it. Matches the other nodes' by step and phase.
  struct Collection {
    std::uint32_t step;
    std::uint32_t phase;  // from 0, in each step
  };
  virtual std::unique_ptr<Stage> gather(const Collection& what, std::span<const std::byte> mine,
                                        std::shared_ptr<std::byte> all) = 0;

  // Reduces `count` elements over all nodes, with any but ReduceOp::avg, in place in `buffer`; with
  // the same result, bit for bit, on all nodes. The stage, or whatever does its work, keeps the
  // buffer as long as anything may write to it, even when it was cancelled. Matches the other
  // nodes' by step, bucket and lane; these come in another order on each node.
  struct LaneReduction {
    std::uint32_t step;
    std::size_t bucket;
    int lane;
    DataType type;
    ReduceOp op;
    std::size_t count;
  };
  virtual std::unique_ptr<Stage> start(const LaneReduction& what,
                                       std::shared_ptr<std::byte> buffer) = 0;

  // A rank of this node aborts `step`, perhaps before it started anything: exchanges of the step
  // that this node has not started, now or later on, are aborted for the other nodes. So are
  // those that are cancelled after it. `at_fault`, by their numbers in the world, are this rank or
  // those that made it abort, of any node; at least one. If several ranks of a node abort, the
  // first says which are at fault.
  virtual void abort(std::uint32_t step, const RankSet& at_fault) noexcept = 0;
};

}  // namespace paceline::shm
