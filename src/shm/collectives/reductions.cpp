#include <array>

#include "shm/collectives/staging.h"
#include "shm/kernels/kernels.h"

namespace paceline::shm {
namespace {

static_assert(kMaxRanks <= kMaxSources);

// A pointer for each rank, without a heap.
template <typename Pointer>
class ByRank {
 public:
  void add(Pointer pointer) { pointers_[size_++] = pointer; }
  operator std::span<Pointer const>() const { return std::span(pointers_).first(size_); }

 private:
  std::array<Pointer, kMaxRanks> pointers_;
  std::size_t size_ = 0;
};

}  // namespace

void Group::all_reduce(const void* input, void* output, std::size_t count, DataType type,
                       ReduceOp op) {
  begin({.operation = Operation::all_reduce, .type = type, .op = op, .count = count});
  reduce_into(input, output);
}

void Group::reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
                   int root) {
  begin({.operation = Operation::reduce, .type = type, .op = op, .root = root, .count = count});
  reduce_into(input, rank() == root ? output : nullptr);
}

bool Group::gets_result(int rank) const {
  return traits(call_.operation).root == RootRole::none || rank == call_.root;
}

void Group::reduce_into(const void* input, void* output) {
  const std::size_t bytes = call_.count * element();
  if (size() == 1) return copy_bytes(output, input, bytes);
  const bool small = bytes <= std::min(kSmallBytes, region_->memory().buffer_bytes());
  const bool tiny = bytes < (region_->oversubscribed() ? kSmallBytes : kTinyBytes);
  if (!tiny && (output == nullptr || input == output)) call_.offset = offset_of(input, bytes);
  return small ? reduce_small(input, output) : reduce_staged(input, output);
}

// Everybody reads everything.
void Group::reduce_small(const void* input, void* output) {
  const auto copy_in = [&] {
    copy_bytes(region_->memory().input(rank(), round_ + 1), input, call_.count * element());
  };
  if (!call_.is_shared()) copy_in();
  first_round();
  if (all_shared()) return reduce_shared();
  if (any_shared()) {  // ranks with shared tensors have not copied in yet
    copy_in();
    next_round();
  }
  if (output == nullptr) return;
  ByRank<const void*> sources;
  for (int peer = 0; peer < size(); ++peer) sources.add(peer == rank() ? input : input_of(peer));
  shm::reduce(call_.type, call_.op, sources, {&output, 1}, call_.count);
  if (has_one_reader()) take_inputs(0, call_.count * element());
}

// Of the other ranks' input buffers.
void Group::take_inputs(std::size_t begin, std::size_t bytes) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) take_lines(input_of(peer) + begin, bytes);
  }
}

// Each rank reduces its slice of all tensors into the tensors of the ranks that get the result.
void Group::reduce_shared() {
  const Slice slice = slice_of(call_.count, element(), rank(), size());
  const std::size_t begin = slice.begin * element();
  ByRank<const void*> sources;
  ByRank<void*> results;
  for (int peer = 0; peer < size(); ++peer) {
    std::byte* const part = shared_part(peer, begin, slice.count() * element());
    sources.add(part);
    if (gets_result(peer)) results.add(part);
  }
  shm::reduce(call_.type, call_.op, sources, results, slice.count());
  next_round();
}

// A pipeline of chunks: while chunk t is copied in, chunk t-1 is reduced, slice by slice, and chunk
// t-2 is copied out, so that each chunk costs one round. A rank's own slice does not pass through
// its staging buffers on the way in nor on the way out.
void Group::reduce_staged(const void* input, void* output) {
  const std::size_t bytes = call_.count * element();
  const std::size_t chunk = region_->memory().buffer_bytes();
  const std::size_t chunks = (bytes + chunk - 1) / chunk;
  // The bytes of chunk t that rank `peer` reduces, counted from the chunk's begin.
  const auto slice = [&](std::size_t t, int peer) {
    const Slice part =
        slice_of(std::min(chunk, bytes - t * chunk) / element(), element(), peer, size());
    return Slice{part.begin * element(), part.end * element()};
  };
  const auto copy_in = [&](std::size_t t) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Slice part = slice(t, peer);
      copy_bytes(region_->memory().input(rank(), round_ + 1) + part.begin,
                 advance(input, t * chunk + part.begin), part.count());
    }
  };
  const bool others_get_result =
      traits(call_.operation).root == RootRole::none || rank() != call_.root;
  const auto reduce_own = [&](std::size_t t) {
    const Slice part = slice(t, rank());
    const std::size_t offset = t * chunk + part.begin;
    ByRank<const void*> sources;
    ByRank<void*> results;
    for (int peer = 0; peer < size(); ++peer) {
      sources.add(peer == rank() ? advance(input, offset) : input_of(peer) + part.begin);
    }
    if (output != nullptr) results.add(advance(output, offset));
    if (others_get_result) {
      results.add(region_->memory().output(rank(), round_ + 1) + part.begin);
    }
    shm::reduce(call_.type, call_.op, sources, results, part.count() / element());
    take_inputs(part.begin, part.count());
  };
  const auto copy_out = [&](std::size_t t) {
    for (int peer = 0; output != nullptr && peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Slice part = slice(t, peer);
      std::byte* const reduced = region_->memory().output(peer, round_) + part.begin;
      copy_bytes(advance(output, t * chunk + part.begin), reduced, part.count());
      if (has_one_reader()) take_lines(reduced, part.count());
    }
  };

  if (!call_.is_shared()) copy_in(0);
  first_round();
  if (all_shared()) return reduce_shared();
  if (any_shared()) {  // as in reduce_small
    copy_in(0);
    next_round();
  }
  for (std::size_t t = 1; t < chunks + 2; ++t) {
    if (t < chunks) copy_in(t);
    if (t <= chunks) reduce_own(t - 1);
    if (t >= 2) copy_out(t - 2);
    if (t <= chunks) next_round();
  }
}

void Group::reduce_scatter(std::span<const Input> inputs, Output output, DataType type,
                           ReduceOp op) {
  begin({.operation = Operation::reduce_scatter, .type = type, .op = op, .count = output.count});
  const bool uneven = std::any_of(inputs.begin(), inputs.end(), [&](const Input& input) {
    return input.count != inputs[0].count;
  });
  if (uneven) set_splits(inputs, {&output, 1});
  const Staging staging(*this, inputs);
  if (staging.is_large()) call_.offset = offset_of(inputs);
  if (!call_.is_shared()) staging.put(0);
  first_round();

  const auto me = static_cast<std::size_t>(rank());
  const std::size_t bytes = output.count * element();
  ByRank<const void*> in_place;
  if (all_shared()) {
    for (int peer = 0; peer < size(); ++peer) in_place.add(shared_part_for_me(peer, bytes));
    shm::reduce(type, op, in_place, {&output.data, 1}, output.count);
    return next_round();
  }
  if (any_shared()) {  // as in reduce_small
    staging.put(0);
    next_round();
  }
  std::size_t largest = 0;
  for (const Input& input : inputs) largest = std::max(largest, input.count * element());
  for (std::size_t chunk = 0; chunk < staging.chunks(largest); ++chunk) {
    ByRank<const void*> sources;
    for (int peer = 0; peer < size(); ++peer) {
      sources.add(peer == rank() ? advance(inputs[me].data, staging.begin_of(chunk))
                                 : staging.get(peer));
    }
    void* const target = advance(output.data, staging.begin_of(chunk));
    const std::size_t size_of_chunk = staging.size_of(chunk, bytes);
    shm::reduce(type, op, sources, {&target, 1}, size_of_chunk / element());
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) take_lines(staging.get(peer), size_of_chunk);
    }
    if (chunk + 1 == staging.chunks(largest)) break;
    staging.put(chunk + 1);
    next_round();
  }
}

}  // namespace paceline::shm
