#include <array>

#include "shm/collectives/staging.h"
#include "shm/kernels/kernels.h"

namespace paceline::shm {
namespace {

static_assert(kMaxRanks <= kMaxSources);

// If all tensors together have at most this many bytes, every rank reads all of them, in one round:
// further copies then cost less than a further round. A further round pays earlier if it saves the
// copies altogether, as with registered tensors, and late if ranks share a core and have to wait
// for it.
constexpr std::size_t kOneRound = std::size_t{4} << 10;
constexpr std::size_t kOneRoundRegistered = std::size_t{2} << 10;
constexpr std::size_t kOneRoundSharingCores = std::size_t{48} << 10;
// The least slice of a registered tensor shorter than kOneSliceEach: a core fetches lines ahead to
// the end of the page, and takes them from the rank whose slice begins there. (In staging buffers,
// slices of all ranks are faster: fewer bytes are copied in and out.)
constexpr std::size_t kLeastSlice = std::size_t{4} << 10;
// From this size on, every rank reduces a slice, however short: few ranks would read for long.
constexpr std::size_t kOneSliceEach = std::size_t{16} << 10;

// The slice of a registered tensor that a rank reduces. If the tensor is short, some have none.
Slice slice_of_registered(std::size_t count, std::size_t element_size, int rank, int size) {
  const auto all = static_cast<std::size_t>(size);
  const std::size_t least = std::min(kLeastSlice, kOneSliceEach / all);
  const std::size_t slices = std::clamp(count * element_size / least, std::size_t{1}, all);
  return slice_of(count, element_size, rank, static_cast<int>(slices));
}

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

// An all_reduce or a reduce of unregistered memory. Tensors larger than the buffer go through it in
// chunks. A rank's own slice of a chunk, the part that it reduces, need not pass through its
// buffer.
class Group::StagedReduction {
 public:
  StagedReduction(Group& group, const void* input, void* output)
      : group_(group),
        input_(input),
        output_(output),
        bytes_(group.call_.count * group.element()),
        buffer_(group.region_->memory().buffer_bytes()) {}

  // Whether every rank reads everything. May become false while ranks map the region, which all
  // have done after the first round: from then on it is the same on all.
  bool is_small() const { return is_small_for(kOneRound); }
  // Whether it costs less than reducing in place, if all tensors are registered.
  bool is_small_registered() const { return is_small_for(kOneRoundRegistered); }

  void copy_in(std::size_t chunk) const {
    if (is_small()) return copy_bytes(group_.next_staging(), input_, bytes_);
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank()) continue;
      const Slice part = slice(chunk, peer);
      copy_bytes(group_.next_staging() + part.begin, in(chunk, part), part.count());
    }
  }

  void run() const { return is_small() ? reduce_all() : pipeline(); }

 private:
  bool is_small_for(std::size_t one_round) const {
    const bool shares_cores = group_.region_->oversubscribed();
    return bytes_ <= buffer_ &&
           bytes_ * group_.calls_.size() <= (shares_cores ? kOneRoundSharingCores : one_round);
  }

  void reduce_all() const {
    if (output_ == nullptr) return;
    ByRank<const void*> sources;
    for (int peer = 0; peer < group_.size(); ++peer) {
      sources.add(peer == group_.rank() ? input_ : group_.staging_of(peer));
    }
    reduce(sources, {&output_, 1}, bytes_);
    for (int peer = 0; group_.has_one_reader() && peer < group_.size(); ++peer) {
      if (peer != group_.rank()) take_lines(group_.staging_of(peer), bytes_);
    }
  }

  // While chunk t is copied in, chunk t-1 is reduced, slice by slice, and chunk t-2 is copied out,
  // so that each chunk costs one round. Between its two copies a chunk is reduced in place, as
  // registered memory is: so each line of a buffer goes to and fro between two cores alone.
  void pipeline() const {
    const std::size_t chunks = (bytes_ + buffer_ - 1) / buffer_;
    for (std::size_t t = 1; t <= chunks; ++t) {
      if (t >= 2) copy_out(t - 2);
      if (t < chunks) copy_in(t);
      reduce_own(t - 1);
      group_.next_round();
    }
    copy_out(chunks - 1);
  }

  void reduce_own(std::size_t chunk) const {
    const Slice part = slice(chunk, group_.rank());
    ByRank<const void*> sources;
    ByRank<void*> results;
    for (int peer = 0; peer < group_.size(); ++peer) {
      const bool own = peer == group_.rank();
      std::byte* const staged = group_.staging_of(peer) + part.begin;
      sources.add(own ? in(chunk, part) : staged);
      if (group_.gets_result(peer)) results.add(own ? out(chunk, part) : staged);
    }
    reduce(sources, results, part.count());
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank() || group_.gets_result(peer)) continue;
      take_lines(group_.staging_of(peer) + part.begin, part.count());
    }
  }

  // From the buffer of the coming round, before the next chunk but one is copied into it.
  void copy_out(std::size_t chunk) const {
    for (int peer = 0; output_ != nullptr && peer < group_.size(); ++peer) {
      if (peer == group_.rank()) continue;
      const Slice part = slice(chunk, peer);
      copy_bytes(out(chunk, part), group_.next_staging() + part.begin, part.count());
    }
  }

  void reduce(std::span<const void* const> sources, std::span<void* const> results,
              std::size_t bytes) const {
    shm::reduce(group_.call_.type, group_.call_.op, sources, results, bytes / group_.element());
  }

  // The bytes of the chunk that rank `peer` reduces, counted from the chunk's begin.
  Slice slice(std::size_t chunk, int peer) const {
    const std::size_t bytes = std::min(buffer_, bytes_ - chunk * buffer_);
    const Slice part = slice_of(bytes / group_.element(), group_.element(), peer, group_.size());
    return {part.begin * group_.element(), part.end * group_.element()};
  }
  const std::byte* in(std::size_t chunk, Slice part) const {
    return advance(input_, chunk * buffer_ + part.begin);
  }
  std::byte* out(std::size_t chunk, Slice part) const {
    return advance(output_, chunk * buffer_ + part.begin);
  }

  Group& group_;
  const void* input_;
  void* output_;
  std::size_t bytes_;
  std::size_t buffer_;
};

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
  const StagedReduction staged(*this, input, output);
  if (!staged.is_small_registered() && (output == nullptr || input == output)) {
    call_.offset = offset_of(input, bytes);
  }
  if (!call_.is_shared()) staged.copy_in(0);
  first_round();
  if (all_shared()) return reduce_shared();
  if (any_shared()) {  // ranks with shared tensors have not copied in yet
    staged.copy_in(0);
    next_round();
  }
  staged.run();
}

// Each rank reduces its slice of all tensors into the tensors of the ranks that get the result.
void Group::reduce_shared() {
  const Slice slice = slice_of_registered(call_.count, element(), rank(), size());
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
  if (any_shared()) {  // as in reduce_into
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
