#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "node/region.h"
#include "node/types.h"

namespace paceline::node {

// The collectives of the ranks that share a region. Every rank must make the same calls in the same
// order; ranks that do not agree throw the same Mismatch before any rank's data has been touched.
// A call that throws a PeerError leaves the group unusable: every later call throws the same.
//
// Memory allocated from the region is read and written in place; other memory goes through staging
// buffers, with results identical bit for bit. Not thread-safe: one call at a time.
class Group {
 public:
  explicit Group(std::shared_ptr<Region> region);

  int rank() const { return region_->rank(); }
  int size() const { return region_->size(); }
  const std::shared_ptr<Region>& region() const { return region_; }
  // How many calls this rank has begun.
  std::uint64_t sequence() const { return sequence_; }
  // How long the calls from here on may wait; at first the region's timeout.
  void set_timeout(std::chrono::milliseconds timeout) { patience_.timeout = timeout; }

  void barrier();
  // `data` holds `count` elements of `type` on every rank.
  void broadcast(void* data, std::size_t count, DataType type, int root);
  // `input` and `output` may be the same.
  void all_reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op);
  // outputs[r] receives the `count` elements of rank r. outputs[rank()] may be `input`.
  void all_gather(const void* input, std::span<void* const> outputs, std::size_t count,
                  DataType type);
  // inputs[r] holds the `count` elements that go to rank r. `output` may be inputs[rank()].
  void reduce_scatter(std::span<const void* const> inputs, void* output, std::size_t count,
                      DataType type, ReduceOp op);

 private:
  class StepWait;
  enum class Kind : std::uint8_t { barrier, broadcast, all_reduce, all_gather, reduce_scatter };

  void begin(Kind kind, std::size_t count, DataType type, ReduceOp op, int root);
  // Publishes this rank's call and what it wrote for the coming step, and waits for all ranks'. The
  // first step of a call compares the calls.
  void first_step(std::uint64_t offset = Call::kNotShared);
  void step();
  void check_agreement();
  std::string describe(const Call& call) const;

  const std::byte* input_of(int rank) const { return region_->input(rank, step_); }
  std::uint64_t offset_of(const void* pointer, std::size_t bytes) const;
  // Every rank's published tensor; empty unless all of them are shared.
  std::vector<void*> shared_tensors(std::size_t bytes);
  std::byte* resolve_or_fail(int rank, std::size_t bytes);

  void all_reduce_small(const void* input, void* output);
  void all_reduce_shared(std::span<void* const> tensors);
  void all_reduce_staged(const void* input, void* output);

  std::shared_ptr<Region> region_;
  Patience patience_;  // of the current call
  std::uint64_t sequence_ = 0;
  std::uint32_t step_ = 0;
  Call call_;
};

// The part [begin, end) of `count` elements that rank `rank` of `size` reduces; its borders lie on
// cache lines, counted from the first element.
struct Slice {
  std::size_t begin;
  std::size_t end;
  std::size_t count() const { return end - begin; }
};
Slice slice_of(std::size_t count, std::size_t element_size, int rank, int size);

}  // namespace paceline::node
