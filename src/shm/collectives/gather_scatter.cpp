#include <algorithm>
#include <array>

#include "shm/collectives/staging.h"

namespace paceline::shm {
namespace {

// Parts that are all empty but one.
class OnlyFrom {
 public:
  OnlyFrom(int rank, int size, Output output) : size_(static_cast<std::size_t>(size)) {
    std::fill_n(outputs_.begin(), size_, Output{nullptr, 0});
    outputs_[static_cast<std::size_t>(rank)] = output;
  }
  operator std::span<const Output>() const { return std::span(outputs_).first(size_); }

 private:
  std::array<Output, kMaxRanks> outputs_;
  std::size_t size_;
};

}  // namespace

void Group::barrier() {
  begin({.operation = Operation::barrier});
  first_round();
}

void Group::broadcast(void* data, std::size_t count, DataType type, int root) {
  begin({.operation = Operation::broadcast, .type = type, .root = root, .count = count});
  const Input part{data, count};
  if (rank() == root) {
    exchange({&part, 1}, {});
  } else {
    exchange({}, OnlyFrom(root, size(), {data, count}));
  }
}

void Group::gather(Input input, std::span<const Output> outputs, DataType type, int root) {
  begin({.operation = Operation::gather, .type = type, .root = root, .count = input.count});
  if (rank() == root) {
    exchange({}, outputs);
    copy_of_results(bytes_of_all(outputs))(outputs[static_cast<std::size_t>(root)].data, input.data,
                                           input.count * element());
  } else {
    exchange({&input, 1}, {});
  }
}

void Group::scatter(std::span<const Input> inputs, Output output, DataType type, int root) {
  begin({.operation = Operation::scatter, .type = type, .root = root, .count = output.count});
  exchange(rank() == root ? inputs : std::span<const Input>(), OnlyFrom(root, size(), output));
}

void Group::all_gather(Input input, std::span<const Output> outputs, DataType type) {
  begin({.operation = Operation::all_gather, .type = type, .count = input.count});
  const bool uneven = std::any_of(outputs.begin(), outputs.end(), [&](const Output& output) {
    return output.count != outputs[0].count;
  });
  if (uneven) set_splits({&input, 1}, outputs);
  exchange({&input, 1}, outputs);
}

void Group::all_to_all(std::span<const Input> inputs, std::span<const Output> outputs,
                       DataType type) {
  begin({.operation = Operation::all_to_all, .type = type});
  set_splits(inputs, outputs);
  exchange(inputs, outputs);
}

// The size of all ranks' tensors, if every rank receives as much as this one.
std::size_t Group::bytes_of_all(std::span<const Output> results) const {
  std::size_t count = 0;
  for (const Output& result : results) count += result.count;
  const TotalSize total = traits(call_.operation).total_size;
  return count * element() * (total.per_rank * calls_.size() + total.once);
}

void Group::exchange(std::span<const Input> sends, std::span<const Output> receives) {
  const bool common = traits(call_.operation).common_part;
  const Staging staging(*this, sends);
  if (staging.is_large()) call_.offset = offset_of(sends);
  const bool shared = call_.is_shared();
  const bool one_copy = !shared && takes_one_copy(staging.largest());
  call_.inputs = one_copy ? reinterpret_cast<std::uintptr_t>(sends.data()) : 0;
  const bool staged = !call_.is_read_in_place();
  call_.staged = staged ? staging.largest() : 0;
  if (staged && size() > 1) staging.put(0);
  first_round();

  const auto me = static_cast<std::size_t>(rank());
  const Copy copy = copy_of_results(bytes_of_all(receives));
  if (!sends.empty() && !receives.empty()) {
    copy(receives[me].data, sends[common ? 0 : me].data, receives[me].count * element());
  }
  if (size() == 1) return;
  std::size_t chunks = 0;
  for (const CollectiveFingerprint& call : calls_)
    chunks = std::max(chunks, staging.chunks(call.staged));
  // From the next rank on: a process that several ranks read at a time is slow to read.
  for (std::size_t i = 1; i < receives.size(); ++i) {
    const std::size_t from = (me + i) % receives.size();
    const Output& output = receives[from];
    const std::size_t bytes = output.count * element();
    const int peer = static_cast<int>(from);
    if (bytes == 0) continue;
    if (calls_[from].is_shared()) {
      copy(output.data, common ? shared_part(peer, 0, bytes) : shared_part_for_me(peer, bytes),
           bytes);
    } else if (calls_[from].is_read_in_place() && !read_part_for_me(peer, output.data, bytes)) {
      call_.refused = 1;
      break;
    }
  }
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::size_t from = 0; from < receives.size(); ++from) {
      if (from == me || calls_[from].is_read_in_place()) continue;
      std::byte* const part = staging.get(static_cast<int>(from));
      const std::size_t bytes = staging.size_of(chunk, receives[from].count * element());
      copy(advance(receives[from].data, staging.begin_of(chunk)), part, bytes);
      if (!common || has_one_reader()) take_lines(part, bytes);
    }
    if (chunk + 1 == chunks) break;
    if (staged) staging.put(chunk + 1);
    next_round();
  }
  if (std::ranges::none_of(calls_, &CollectiveFingerprint::is_read_in_place)) return;
  next_round();  // until then peers may read this rank's parts
  if (!any_refused()) return;
  may_read_processes_ = false;
  call_.refused = 0;
  exchange(sends, receives);
}

bool Group::takes_one_copy(std::size_t bytes) const {
  // docs/collectives.md explains this limit.
  constexpr std::size_t kSingleCopyBytes = std::size_t{4} << 20;
  if (!traits(call_.operation).single_copy || !may_read_processes_ || bytes == 0) return false;
  if (const auto least = region_->options().single_copy_bytes) return bytes >= *least;
  return bytes >= kSingleCopyBytes && size() > 2 && !region_->oversubscribed();
}

bool Group::read_part_for_me(int from, void* target, std::size_t bytes) const {
  const std::uint64_t inputs = calls_[static_cast<std::size_t>(from)].inputs;
  const std::size_t before = static_cast<std::size_t>(rank()) * sizeof(Input);
  Input part{};
  const CrossMemoryReader& memory = region_->cross_memory();
  return memory.read(from, inputs + before, &part, sizeof(part)) &&
         memory.read(from, reinterpret_cast<std::uintptr_t>(part.data), target, bytes);
}

bool Group::any_refused() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (region_->memory().slot(peer, round_).call.refused != 0) return true;
  }
  return false;
}

}  // namespace paceline::shm
