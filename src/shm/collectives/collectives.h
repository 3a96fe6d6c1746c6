#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "shm/kernels/types.h"
#include "shm/wait_context.h"

namespace paceline::shm {

// One rank's part of what a call moves. Counts are elements.
struct Input {
  const void* data;
  std::size_t count;
};
struct Output {
  void* data;
  std::size_t count;
};

// The collectives of a group's ranks. Every rank must make the same calls in the same order. If the
// calls differ, all ranks throw the same Mismatch before any data is touched. A call that throws a
// PeerError leaves the group unusable: every later call throws the same. Not thread-safe: one call
// at a time.
class Collectives {
 public:
  virtual ~Collectives() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const GlobalRanks& global_ranks() const = 0;
  // How long each later call may wait; initially the region's timeout. The next `together` calls
  // share it.
  void set_timeout(std::chrono::milliseconds timeout, std::size_t together = 1) {
    deadline_ = {timeout, std::nullopt};
    sharing_ = together;
  }
  std::chrono::milliseconds timeout() const { return deadline_.timeout; }

  virtual void barrier() = 0;
  // `data` holds `count` elements of `type` on every rank.
  virtual void broadcast(void* data, std::size_t count, DataType type, int root) = 0;
  // `input` and `output` may be the same; in reduce_scatter, `output` and inputs[rank()].
  virtual void all_reduce(const void* input, void* output, std::size_t count, DataType type,
                          ReduceOp op) = 0;
  // `output` is written on the root only, and may be null on others.
  virtual void reduce(const void* input, void* output, std::size_t count, DataType type,
                      ReduceOp op, int root) = 0;
  // outputs[r] receives the input of rank r, on the root; other ranks may pass none. All parts have
  // the same size.
  virtual void gather(Input input, std::span<const Output> outputs, DataType type, int root) = 0;
  // inputs[r] goes to rank r, from the root; other ranks may pass none. All parts have the same
  // size.
  virtual void scatter(std::span<const Input> inputs, Output output, DataType type, int root) = 0;
  // outputs[r] receives the input of rank r, which may differ in size. outputs[rank()] may be
  // `input`.
  virtual void all_gather(Input input, std::span<const Output> outputs, DataType type) = 0;
  // `output` receives the reduction of every rank's inputs[r], r being this rank. Parts may differ
  // in size, alike on all ranks.
  virtual void reduce_scatter(std::span<const Input> inputs, Output output, DataType type,
                              ReduceOp op) = 0;
  // inputs[r] goes to rank r; outputs[r] receives rank r's input for this rank. Sizes are free, as
  // long as each pair agrees.
  virtual void all_to_all(std::span<const Input> inputs, std::span<const Output> outputs,
                          DataType type) = 0;

  // Makes a Mismatch in the last call the group's failure, and throws it. `ranks`: those at fault.
  [[noreturn]] virtual void fail(const RankSet& ranks, const std::string& text) = 0;

 protected:
  explicit Collectives(std::chrono::milliseconds timeout) : deadline_{timeout} {}

  // Call when a call begins.
  void begin_deadline() {
    if (sharing_ == 0) {
      deadline_.deadline.reset();
    } else {
      --sharing_;
    }
  }

  CallDeadline deadline_;  // of the current call

 private:
  std::size_t sharing_ = 0;  // calls to come that share the deadline with the one before
};

}  // namespace paceline::shm
