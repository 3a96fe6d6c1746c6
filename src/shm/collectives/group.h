#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/collectives/collectives.h"
#include "shm/kernels/types.h"
#include "shm/region.h"
#include "shm/wait_context.h"

namespace paceline::shm {

// A call that is made of calls of Groups: errors and reports are about it, and its parts share its
// deadline.
class OuterCall {
 public:
  virtual OpContext context() const = 0;
  virtual CallDeadline& deadline() = 0;
  // "all_reduce of 10 float32, call 17 of group world".
  virtual std::string describe() const = 0;
  // What WaitContext answers while the call waits for the ranks `missing` of this node.
  virtual RankSet missing_on_other_nodes(const RankSet& missing) const = 0;
  virtual bool may_learn_more(const RankSet& missing) = 0;
  virtual std::string describe_on_other_nodes(const RankSet& ranks) const = 0;

 protected:
  ~OuterCall() = default;
};

// The collectives of the ranks that share a region.
//
// Memory allocated from the region is read and written in place; other memory goes through staging
// buffers, with results identical bit for bit. docs/collectives.md describes how each call works
// and what it costs.
class Group final : public Collectives {
 public:
  explicit Group(std::shared_ptr<Region> region);

  int rank() const override { return region_->rank(); }
  int size() const override { return region_->size(); }
  const GlobalRanks& global_ranks() const override { return region_->global_ranks(); }
  const std::shared_ptr<Region>& region() const { return region_; }
  // Later calls are parts of this one; null: of none.
  void set_outer_call(OuterCall* call) { outer_call_ = call; }
  // On a node of several: the last call of the group on all of them, which this rank shows others
  // in place of its calls of this group. `call.across_nodes` is 1.
  void show(const CollectiveFingerprint& call) { shown_ = call; }

  void barrier() override;
  void broadcast(void* data, std::size_t count, DataType type, int root) override;
  void all_reduce(const void* input, void* output, std::size_t count, DataType type,
                  ReduceOp op) override;
  void reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
              int root) override;
  void gather(Input input, std::span<const Output> outputs, DataType type, int root) override;
  void scatter(std::span<const Input> inputs, Output output, DataType type, int root) override;
  void all_gather(Input input, std::span<const Output> outputs, DataType type) override;
  void reduce_scatter(std::span<const Input> inputs, Output output, DataType type,
                      ReduceOp op) override;
  void all_to_all(std::span<const Input> inputs, std::span<const Output> outputs,
                  DataType type) override;
  [[noreturn]] void fail(const RankSet& ranks, const std::string& text) override;

 private:
  class RoundWait;
  class Staging;
  class StagedReduction;

  // Checks the root and the reduction, and makes `call` the current one.
  void begin(CollectiveFingerprint call);
  void set_splits(std::span<const Input> to, std::span<const Output> from);
  // Publishes this rank's call and its data for the coming round, and waits for all ranks. The
  // first round of a call fills `calls_` and compares the calls.
  void first_round();
  void next_round();
  void next_round(RoundWait& context);
  void check_agreement();
  std::string last_call_of(int rank) const;
  // Of the current call.
  CallDeadline& deadline() { return outer_call_ != nullptr ? outer_call_->deadline() : deadline_; }
  OpContext context() const {
    return outer_call_ != nullptr ? outer_call_->context()
                                  : OpContext{name(call_.operation), sequence_};
  }
  std::string describe_call() const;

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
  // Whether the other ranks are to read this rank's parts, the largest of `bytes`, from its
  // process.
  bool takes_one_copy(std::size_t bytes) const;
  // Reads such a part of another rank; false if that is not possible.
  bool read_part_for_me(int from, void* target, std::size_t bytes) const;
  // Whether a rank could not, as published with the closing round.
  bool any_refused() const;
  std::size_t bytes_of_all(std::span<const Output> results) const;
  // all_reduce and reduce; `output` is null on ranks that do not get the result.
  void reduce_into(const void* input, void* output);
  bool gets_result(int rank) const;
  void reduce_shared();

  std::shared_ptr<Region> region_;
  OuterCall* outer_call_ = nullptr;
  std::optional<CollectiveFingerprint> shown_;
  std::uint64_t sequence_ = 0;
  std::uint32_t round_ = 0;
  bool may_read_processes_ = true;  // false, on all ranks alike, once any of them could not
  CollectiveFingerprint call_;      // the current one
  Splits own_splits_;               // of the current one, if it is uneven
  // All ranks' calls, copied once: a broken peer may change its own at any time.
  std::vector<CollectiveFingerprint> calls_;
};

// Throws UsageError unless `root` is a rank of a group of that size.
void check_root(const char* operation, std::int64_t root, int size);
// Checks the root and the reduction of a call in a group of that size.
void check_arguments(const CollectiveFingerprint& call, int size);

// The part [begin, end) of `count` elements that rank `rank` of `size` reduces; its borders lie on
// cache lines, counted from the first element. Ranks from `size` on reduce nothing.
struct Slice {
  std::size_t begin;
  std::size_t end;
  std::size_t count() const { return end - begin; }
};
Slice slice_of(std::size_t count, std::size_t element_size, int rank, int size);

}  // namespace paceline::shm
