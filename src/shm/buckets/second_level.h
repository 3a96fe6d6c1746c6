#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shm/buckets/step_summary.h"

namespace paceline::shm {

// How the nodes of a job exchange what the ranks of each have reduced: the second level of a
// BucketReducer. Each rank has its own, for its own BucketReducer. Together they connect the
// reducers of all nodes. Call it on the thread that uses the reducer. It never waits.
class SecondLevel {
 public:
  // An exchange between nodes that is under way.
  class Stage {
   public:
    enum class State { under_way, complete, aborted };

    // Destroy only after cancel() or when complete.
    virtual ~Stage() = default;
    // Throws if the exchange has failed: a PeerError that names ranks, if they are known. Returns
    // `aborted` if another node cancelled this exchange, or has begun a later step without starting
    // it.
    virtual State poll() = 0;
    // Call while this rank waits for the exchange and does nothing else. Throws like poll() if
    // other nodes do something else instead, and never come.
    virtual void check() {}
    // Cancels the exchange. Do not poll it afterwards.
    virtual void cancel() noexcept = 0;
    // Whether it rings this rank's doorbell when poll() may return something else. If not, it is
    // polled again and again.
    virtual bool rings() const { return false; }
    // The global ranks that it waits for.
    virtual RankSet awaited() const = 0;
    // Once it is aborted: the global ranks at fault, as named by the nodes that aborted it;
    // none if unknown.
    virtual RankSet at_fault() const = 0;
  };

  virtual ~SecondLevel() = default;

  // The global ranks of the job.
  virtual const std::vector<int>& ranks() const = 0;
  // The node of each of `ranks`.
  virtual const std::vector<int>& nodes() const = 0;
  // The indices of this node's ranks in `ranks`, by local rank.
  virtual const std::vector<int>& here() const = 0;
  // By part: the local ranks of this node whose values are added up before other nodes get their
  // sum.
  virtual const std::vector<std::vector<int>>& parts() const = 0;
  // The number of lanes; equal on all nodes, at most the size of the smallest node. Local rank l
  // starts the reductions of lane l.
  virtual int lanes() const = 0;

  // Call on local rank 0. Gathers equally many bytes from every rank of the job. `mine`: this
  // node's, in rank order, read before return. `all`: all ranks', in the order of ranks(); kept as
  // long as anything may write to it. Matches the other nodes' calls by step and phase.
  struct Collection {
    std::uint32_t step;
    std::uint32_t phase;  // from 0, in each step
  };
  virtual std::unique_ptr<Stage> gather(const Collection& what, std::span<const std::byte> mine,
                                        std::shared_ptr<std::byte> all) = 0;

  // Reduces `count` elements over all nodes; `op` is not ReduceOp::avg. `buffer` has `count` sums
  // for each of parts(), one part after the other; the result replaces those of the first part. All
  // nodes get the same result, bit for bit. The buffer is kept as long as anything may write to it,
  // even after a cancel. Matches the other nodes' calls by step, bucket and lane. Nodes may start
  // them in any order.
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

  // Call on local rank 0, regularly while it waits. The global ranks without which other nodes
  // cannot go on, and which do not run.
  virtual RankSet silent_leaders() = 0;

  // Aborts `step` on this node. Exchanges of the step that this node has not started, or cancels
  // from now on, become `aborted` on the other nodes. `at_fault`: global ranks, none if unknown.
  // `gone`: this rank has destroyed its reducer; the exception that did so may end the rank, so the
  // other nodes wait up to a second for its text. Which rank's call wins is not specified.
  virtual void abort(std::uint32_t step, const RankSet& at_fault, bool gone) noexcept = 0;
};

}  // namespace paceline::shm
