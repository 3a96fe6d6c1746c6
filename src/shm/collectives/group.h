#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shm/kernels/types.h"
#include "shm/region.h"

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

// The collectives of the ranks that share a region. Every rank must make the same calls in the same
// order. If the calls differ, all ranks throw the same Mismatch before any data is touched.
// A call that throws a PeerError leaves the group unusable: every later call throws the same.
//
// Memory allocated from the region is read and written in place; other memory goes through staging
// buffers, with results identical bit for bit. Not thread-safe: one call at a time.
// docs/collectives.md describes how each call works and what it costs.
class Group {
 public:
  explicit Group(std::shared_ptr<Region> region);

  int rank() const { return region_->rank(); }
  int size() const { return region_->size(); }
  const std::shared_ptr<Region>& region() const { return region_; }
  // How many calls this rank has begun.
  std::uint64_t sequence() const { return sequence_; }
  // How long each later call may wait; initially the region's timeout. The next `together` calls
  // share it.
  void set_timeout(std::chrono::milliseconds timeout, std::size_t together = 1);
  std::chrono::milliseconds timeout() const { return deadline_.timeout; }

  void barrier();
  // `data` holds `count` elements of `type` on every rank.
  void broadcast(void* data, std::size_t count, DataType type, int root);
  // `input` and `output` may be the same; in reduce_scatter, `output` and inputs[rank()].
  void all_reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op);
  // `output` is written on the root only, and may be null on others.
  void reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
              int root);
  // outputs[r] receives the input of rank r, on the root; other ranks may pass none. All parts have
  // the same size.
  void gather(Input input, std::span<const Output> outputs, DataType type, int root);
  // inputs[r] goes to rank r, from the root; other ranks may pass none. All parts have the same
  // size.
  void scatter(std::span<const Input> inputs, Output output, DataType type, int root);
  // outputs[r] receives the input of rank r, which may differ in size. outputs[rank()] may be
  // `input`.
  void all_gather(Input input, std::span<const Output> outputs, DataType type);
  // `output` receives the reduction of every rank's inputs[r], r being this rank. Parts may differ
  // in size, alike on all ranks.
  void reduce_scatter(std::span<const Input> inputs, Output output, DataType type, ReduceOp op);
  // inputs[r] goes to rank r; outputs[r] receives rank r's input for this rank. Sizes are free, as
  // long as each pair agrees.
  void all_to_all(std::span<const Input> inputs, std::span<const Output> outputs, DataType type);

 private:
  class RoundWait;
  class Staging;
  class StagedReduction;

  // Checks the root and the reduction, and makes `call` the current one.
  void begin(CollectiveFingerprint call);
  void check_arguments(const CollectiveFingerprint& call) const;
  void set_splits(std::span<const Input> to, std::span<const Output> from);
  // Publishes this rank's call and its data for the coming round, and waits for all ranks. The
  // first round of a call fills `calls_` and compares the calls.
  void first_round();
  void next_round();
  void next_round(RoundWait& context);
  void check_agreement();
  [[noreturn]] void fail(const RankSet& ranks, const std::string& text);
  std::string last_call_of(int rank) const;

  // The staging buffer that the rank filled for the last round.
  std::byte* staging_of(int rank) const { return region_->memory().staging(rank, round_); }
  // The staging buffer that this rank fills for the coming round.
  std::byte* next_staging() const { return region_->memory().staging(rank(), round_ + 1); }
  std::size_t element() const { return element_size(call_.type); }
  bool any_shared() const;
  bool all_shared() const;
  // Whether one rank alone reads what a rank stages for all.
  bool has_one_reader() const;
  std::uint64_t offset_of(const void* pointer, std::size_t bytes) const;
  std::uint64_t offset_of(std::span<const Input> parts) const;
  std::size_t largest_part_of(int rank) const;
  // `bytes` of the tensor that a rank published, from byte `begin` on.
  std::byte* shared_part(int rank, std::size_t begin, std::size_t bytes);
  // The part that goes to this rank.
  std::byte* shared_part_for_me(int from, std::size_t bytes);

  // Moves this rank's parts to the others and theirs to it: every call that only moves data.
  void exchange(std::span<const Input> sends, std::span<const Output> receives);
  std::size_t bytes_of_all(std::span<const Output> results) const;
  // all_reduce and reduce; `output` is null on ranks that do not get the result.
  void reduce_into(const void* input, void* output);
  bool gets_result(int rank) const;
  void reduce_shared();

  std::shared_ptr<Region> region_;
  CallDeadline deadline_;    // of the current call
  std::size_t sharing_ = 0;  // calls to come that share the deadline with the one before
  std::uint64_t sequence_ = 0;
  std::uint32_t round_ = 0;
  CollectiveFingerprint call_;  // the current one
  Splits own_splits_;           // of the current one, if it is uneven
  // All ranks' calls, copied once: a broken peer may change its own at any time.
  std::vector<CollectiveFingerprint> calls_;
};

// Throws UsageError unless `root` is a rank of a group of that size.
void check_root(const char* operation, std::int64_t root, int size);

// The part [begin, end) of `count` elements that rank `rank` of `size` reduces; its borders lie on
// cache lines, counted from the first element. Ranks from `size` on reduce nothing.
struct Slice {
  std::size_t begin;
  std::size_t end;
  std::size_t count() const { return end - begin; }
};
Slice slice_of(std::size_t count, std::size_t element_size, int rank, int size);

}  // namespace paceline::shm
