// The calls that reduce.
//
// Nodes exchange partial sums: each node adds up, in its own memory, the nodes of the tree whose
// leaves all run on it (NodeMap::Part), and the sums of all nodes are completed where they meet. So
// the order of the additions is the tree's, wherever ranks run.

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "internode/call.h"
#include "internode/group.h"
#include "shm/kernels/kernels.h"

namespace paceline::internode {

using shm::DataType;
using shm::Input;
using shm::Operation;
using shm::Output;
using shm::ReduceOp;
using shm::Slice;

// Whether any node adds up several ranks. If none does, nodes exchange elements: 16-bit floats are
// half as large as their sums.
bool Group::has_sums() const {
  return parts_.size() < static_cast<std::size_t>(size());
}

std::size_t Group::sum_size(DataType type) const {
  return element_size(has_sums() ? accumulation_type(type) : type);
}

std::size_t Group::bytes_of_sums(int node, DataType type, std::size_t count) const {
  return map_.parts(node).size() * count * sum_size(type);
}

void Group::accumulate(std::span<const std::byte* const> sources, DataType type, ReduceOp op,
                       std::size_t count, std::byte* sums) const {
  for (const NodeMap::Part& part : map_.parts(map_.node())) {
    std::array<const void*, shm::kMaxSources> terms;
    for (std::size_t k = 0; k < part.ranks.size(); ++k) {
      terms[k] = sources[static_cast<std::size_t>(map_.local_rank_of(part.ranks[k]))];
    }
    if (has_sums()) {
      shm::accumulate(type, op,
                      {.sources = std::span(terms).first(part.ranks.size()), .leaves = part.ranks},
                      sums, count);
    } else {
      std::memcpy(sums, terms.front(), count * sum_size(type));
    }
    sums += count * sum_size(type);
  }
}

void Group::complete(std::span<const std::byte* const> sums, DataType type, ReduceOp op,
                     std::size_t count, void* result) const {
  std::array<const void*, shm::kMaxSources> terms;
  std::array<int, shm::kMaxSources> leaves;
  for (std::size_t k = 0; k < parts_.size(); ++k) {
    const auto& [node, index, first_leaf] = parts_[k];
    terms[k] = sums[static_cast<std::size_t>(node)] + index * count * sum_size(type);
    leaves[k] = first_leaf;
  }
  const shm::Terms sums_of_all{.sources = std::span(terms).first(parts_.size()),
                               .leaves = std::span(leaves).first(parts_.size())};
  const auto divisor = static_cast<double>(size());
  if (has_sums()) {
    shm::complete(type, op, sums_of_all, divisor, {&result, 1}, count);
  } else {
    shm::reduce(type, op, sums_of_all, divisor, {&result, 1}, count);
  }
}

// Whether a node gets all sums of a lane, or those of its slice and then the results of the other
// slices: whatever is fewer bytes, and the first, which is one exchange instead of two, for few.
bool Group::is_whole_less(std::size_t sum_bytes, std::size_t result_bytes,
                          std::size_t count) const {
  constexpr std::size_t kFewBytes = std::size_t{16} << 10;
  const std::size_t whole = static_cast<std::size_t>(map_.nodes()) * most_parts_ * sum_bytes;
  const std::size_t in_slices = most_parts_ * sum_bytes + result_bytes;
  return whole <= in_slices || count * sum_bytes <= kFewBytes;
}

Group::Division Group::divide_sums(std::size_t count, DataType type) const {
  Division division = divide(count, type);
  division.whole = is_whole_less(sum_size(type), element_size(type), count);
  return division;
}

Group::Division Group::divide_lane(std::size_t count, DataType type) const {
  const std::size_t size = element_size(type);
  return {.count = count,
          .element_size = size,
          .lanes = 1,
          .whole = is_whole_less(size, size, count),
          .nodes = map_.nodes()};
}

// The reduction of a part of a tensor, lane by lane. The constructor makes and sends sums; finish()
// waits for those of the other nodes. So the next part can begin before this one is finished.
class Group::LaneReduction {
 public:
  // `number`: of the part, in the call.
  LaneReduction(Group& group, const std::byte* input, std::size_t count, DataType type, ReduceOp op,
                std::optional<int> to, std::uint32_t number)
      : group_(group),
        type_(type),
        op_(op),
        to_(to),
        number_(number),
        division_(group.divide_sums(count, type)),
        lane_(division_.lane(group.local_.rank())) {
    collect(input);
    send_sums();
  }

  const Division& division() const { return division_; }
  const Slice& lane() const { return lane_; }

  // Every lane's owner gets its lane, in `lane`; with `to`, on that node only.
  void finish(std::byte* lane) {
    exchange_->finish();
    const Slice own = division_.slice(lane_, group_.map_.node());
    if (completes() && own.count() > 0) {
      group_.complete(sums_, type_, op_, own.count(), lane + own.begin * division_.element_size);
    }
    if (!division_.whole) group_.gather_slices(division_, lane, to_, 2 * number_ + 1);
  }

 private:
  // Where only one node gets a whole lane, the others have nothing to complete.
  bool completes() const {
    return !division_.whole || to_.value_or(group_.map_.node()) == group_.map_.node();
  }

  // Gets the lane of each rank of this node.
  void collect(const std::byte* input) {
    std::vector<Input> to;
    std::vector<Output> from;
    const std::size_t bytes = lane_.count() * division_.element_size;
    received_ = allocate(group_.local_size() * bytes);
    for (int rank = 0; rank < group_.local_.size(); ++rank) {
      const Slice lane = division_.lane(rank);
      to.push_back({input + lane.begin * division_.element_size, lane.count()});
      std::byte* const memory = received_.get() + static_cast<std::size_t>(rank) * bytes;
      from.push_back({memory, lane_.count()});
      sources_.push_back(memory);
    }
    group_.local_.all_to_all(to, from, type_);
  }

  void send_sums() {
    const NodeMap& map = group_.map_;
    const std::size_t own = division_.slice(lane_, map.node()).count();
    Messages sends;
    Messages receives;
    std::byte* of_all = nullptr;  // the sums that go to every node, if each gets the same
    for (int node = 0; node < map.nodes() && lane_.count() > 0; ++node) {
      const Slice slice = division_.slice(lane_, node);
      std::byte* const made = division_.whole && of_all != nullptr ? of_all : accumulate(slice);
      if (division_.whole) of_all = made;
      if (node == map.node()) {
        sums_.push_back(made);
        continue;
      }
      if (slice.count() > 0 && (!division_.whole || to_.value_or(node) == node)) {
        sends.push_back(
            {group_.lane_peer(node), made, group_.bytes_of_sums(map.node(), type_, slice.count())});
      }
      const std::size_t bytes = completes() ? group_.bytes_of_sums(node, type_, own) : 0;
      std::byte* const memory = memory_.emplace_back(allocate(bytes)).get();
      if (bytes > 0) receives.push_back({group_.lane_peer(node), memory, bytes});
      sums_.push_back(memory);
    }
    exchange_.emplace(group_, sends, receives, 2 * number_);
  }

  std::byte* accumulate(const Slice& slice) {
    const std::size_t bytes = group_.bytes_of_sums(group_.map_.node(), type_, slice.count());
    std::byte* const sums = memory_.emplace_back(allocate(bytes)).get();
    std::vector<const std::byte*> sources = sources_;
    for (const std::byte*& source : sources) source += slice.begin * division_.element_size;
    if (slice.count() > 0) group_.accumulate(sources, type_, op_, slice.count(), sums);
    return sums;
  }

  Group& group_;
  DataType type_;
  ReduceOp op_;
  std::optional<int> to_;
  std::uint32_t number_;
  Division division_;
  Slice lane_;
  Memory received_;
  std::vector<const std::byte*> sources_;  // by local rank
  std::vector<Memory> memory_;             // of sums
  std::vector<const std::byte*> sums_;     // by node, of this node's slice
  std::optional<Exchange> exchange_;       // destroyed before the memory
};

// Calls share(reduction, offset of the part in elements) for each part of a tensor, in order. While
// a part is under way between nodes, the next one is added up on each.
template <typename Share>
void Group::reduce_in_parts(const void* input, std::size_t count, DataType type, ReduceOp op,
                            std::optional<int> to, Share share) {
  constexpr std::size_t kPart = std::size_t{4} << 20;
  const std::size_t part = kPart / element_size(type);
  std::unique_ptr<LaneReduction> before;
  for (std::size_t begin = 0; begin < count || before; begin += part) {
    std::unique_ptr<LaneReduction> next;
    if (begin < count) {
      next = std::make_unique<LaneReduction>(
          *this, static_cast<const std::byte*>(input) + begin * element_size(type),
          std::min(part, count - begin), type, op, to, static_cast<std::uint32_t>(begin / part));
    }
    if (before) share(*before, begin - part);
    before = std::move(next);
  }
}

void Group::all_reduce(const void* input, void* output, std::size_t count, DataType type,
                       ReduceOp op) {
  const Call call(*this,
                  {.operation = Operation::all_reduce, .type = type, .op = op, .count = count});
  reduce_in_parts(
      input, count, type, op, std::nullopt, [&](LaneReduction& reduction, std::size_t begin) {
        std::byte* const part = static_cast<std::byte*>(output) + begin * element_size(type);
        reduction.finish(part + reduction.lane().begin * element_size(type));
        share_lanes(reduction.division(), part, type);
      });
}

void Group::reduce(const void* input, void* output, std::size_t count, DataType type, ReduceOp op,
                   int root) {
  const Call call(
      *this,
      {.operation = Operation::reduce, .type = type, .op = op, .root = root, .count = count});
  const int node = map_.node_of(root);
  reduce_in_parts(input, count, type, op, node, [&](LaneReduction& reduction, std::size_t begin) {
    const std::size_t lane_count = reduction.lane().count();
    const Memory lane = allocate(lane_count * element_size(type));
    reduction.finish(lane.get());
    if (map_.node() != node) return;
    std::vector<Input> to(local_size(), Input{lane.get(), 0});
    std::vector<Output> from(local_size(), Output{nullptr, 0});
    to[static_cast<std::size_t>(map_.local_rank_of(root))].count = lane_count;
    for (int rank = 0; this->rank() == root && rank < local_.size(); ++rank) {
      const Slice part = reduction.division().lane(rank);
      from[static_cast<std::size_t>(rank)] = {
          static_cast<std::byte*>(output) + (begin + part.begin) * element_size(type),
          part.count()};
    }
    local_.all_to_all(to, from, type);
  });
}

// The sums for a rank are made on each node by one rank, which sends them to it: on its own node by
// itself, on others by the rank with its local rank, modulo their size.
void Group::reduce_scatter(std::span<const Input> inputs, Output output, DataType type,
                           ReduceOp op) {
  const bool uneven =
      std::ranges::any_of(inputs, [&](const Input& input) { return input.count != output.count; });
  const OwnSplits splits = uneven ? splits_of(inputs, {&output, 1}) : OwnSplits();
  const Call call(*this,
                  {.operation = Operation::reduce_scatter,
                   .type = type,
                   .op = op,
                   .uneven = static_cast<std::uint8_t>(uneven),
                   .count = uneven ? 0 : output.count},
                  uneven ? &splits : nullptr);
  const auto adder_of = [&](int rank, int node) {
    const auto here = static_cast<int>(map_.ranks_on(node).size());
    return map_.rank_at(node, map_.local_rank_of(rank) % here);
  };
  // For each local rank, the parts whose sums it makes, one after the other.
  std::vector<std::vector<int>> destinations(local_size());
  std::vector<std::size_t> counts(local_size());
  std::size_t total = 0;
  for (int rank = 0; rank < size(); ++rank) {
    const auto adder = static_cast<std::size_t>(map_.local_rank_of(adder_of(rank, map_.node())));
    const std::size_t count = inputs[static_cast<std::size_t>(rank)].count;
    destinations[adder].push_back(rank);
    counts[adder] += count;
    total += count;
  }
  const std::size_t element = element_size(type);
  const Memory packed = allocate(total * element);
  std::vector<Input> to;
  std::byte* next = packed.get();
  for (std::size_t adder = 0; adder < local_size(); ++adder) {
    to.push_back({next, counts[adder]});
    for (const int rank : destinations[adder]) {
      const Input& part = inputs[static_cast<std::size_t>(rank)];
      if (part.count > 0) std::memcpy(next, part.data, part.count * element);
      next += part.count * element;
    }
  }
  const auto own = static_cast<std::size_t>(local_.rank());
  const Memory received = allocate(local_size() * counts[own] * element);
  std::vector<Output> from;
  std::vector<const std::byte*> sources;
  for (std::size_t rank = 0; rank < local_size(); ++rank) {
    std::byte* const memory = received.get() + rank * counts[own] * element;
    from.push_back({memory, counts[own]});
    sources.push_back(memory);
  }
  local_.all_to_all(to, from, type);

  std::vector<Memory> kept;
  std::vector<const std::byte*> sums(static_cast<std::size_t>(map_.nodes()));
  Messages sends;
  Messages receives;
  for (const int rank : destinations[own]) {
    const std::size_t count = inputs[static_cast<std::size_t>(rank)].count;
    const std::size_t bytes = bytes_of_sums(map_.node(), type, count);
    std::byte* const made = kept.emplace_back(allocate(bytes)).get();
    if (count > 0) accumulate(sources, type, op, count, made);
    for (const std::byte*& source : sources) source += count * element;
    if (rank == this->rank()) {
      sums[static_cast<std::size_t>(map_.node())] = made;
    } else if (bytes > 0) {
      sends.push_back({rank, made, bytes});
    }
  }
  for (int node = 0; node < map_.nodes(); ++node) {
    if (node == map_.node()) continue;
    const std::size_t bytes = bytes_of_sums(node, type, output.count);
    std::byte* const memory = kept.emplace_back(allocate(bytes)).get();
    sums[static_cast<std::size_t>(node)] = memory;
    if (bytes > 0) receives.push_back({adder_of(rank(), node), memory, bytes});
  }
  exchange(sends, receives, 0);
  if (output.count > 0) complete(sums, type, op, output.count, output.data);
}

}  // namespace paceline::internode
