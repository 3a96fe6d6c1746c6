// The calls that only move data.

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "internode/call.h"
#include "internode/group.h"

namespace paceline::internode {

using shm::DataType;
using shm::Input;
using shm::Operation;
using shm::Output;
using shm::Slice;

namespace {

std::byte* address(const void* data) {
  return static_cast<std::byte*>(const_cast<void*>(data));
}

// Calls visitor(piece, offset in the bytes [begin, end)) for each piece of them, where the parts
// follow each other.
template <typename Part, typename Visitor>
void visit_bytes(std::span<const Part> parts, std::size_t element, const Slice& bytes,
                 Visitor visitor) {
  std::size_t before = 0;
  for (const Part& part : parts) {
    const std::size_t size = part.count * element;
    const std::size_t begin = std::max(bytes.begin, before);
    const std::size_t end = std::min(bytes.end, before + size);
    if (begin < end) {
      visitor(std::span(address(part.data) + (begin - before), end - begin), begin - bytes.begin);
    }
    before += size;
  }
}

template <typename Part>
std::size_t bytes_of(std::span<const Part> parts, std::size_t element) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += part.count * element;
  return bytes;
}

}  // namespace

Slice Group::Division::lane(int lane) const {
  return lane < lanes ? shm::slice_of(count, element_size, lane, lanes) : Slice{0, 0};
}

Slice Group::Division::slice(const Slice& lane, int node) const {
  return whole ? Slice{0, lane.count()} : shm::slice_of(lane.count(), element_size, node, nodes);
}

Group::Division Group::divide(std::size_t count, DataType type) const {
  // A message costs more than so many bytes, and ranks share cores.
  constexpr std::size_t kLeastLane = std::size_t{16} << 10;
  const std::size_t bytes = count * element_size(type);
  const auto most = static_cast<std::size_t>(map_.lanes());
  return {.count = count,
          .element_size = element_size(type),
          .lanes = static_cast<int>(std::clamp(bytes / kLeastLane, std::size_t{1}, most)),
          .nodes = map_.nodes()};
}

template <typename Part>
std::vector<Part> Group::local_parts(std::span<const Part> parts) const {
  std::vector<Part> local;
  for (const int rank : map_.here()) {
    if (!parts.empty()) local.push_back(parts[static_cast<std::size_t>(rank)]);
  }
  return local;
}

void Group::share_lanes(const Division& division, std::byte* data, DataType type) {
  std::vector<Output> lanes;
  for (int rank = 0; rank < local_.size(); ++rank) {
    const Slice lane = division.lane(rank);
    lanes.push_back({data + lane.begin * division.element_size, lane.count()});
  }
  const Output own = lanes[static_cast<std::size_t>(local_.rank())];
  local_.all_gather({own.data, own.count}, lanes, type);
}

void Group::gather_slices(const Division& division, std::byte* lane, std::optional<int> to,
                          std::uint32_t number) {
  const Slice all = division.lane(local_.rank());
  const auto message = [&](int node, const Slice& slice) {
    return slice_message(node, lane, slice, division.element_size);
  };
  Messages sends;
  Messages receives;
  for (int node = 0; node < map_.nodes() && all.count() > 0; ++node) {
    if (node == map_.node()) continue;
    const Slice own = division.slice(all, map_.node());
    const Slice other = division.slice(all, node);
    if (own.count() > 0 && to.value_or(node) == node) sends.push_back(message(node, own));
    if (other.count() > 0 && to.value_or(map_.node()) == map_.node()) {
      receives.push_back(message(node, other));
    }
  }
  exchange(sends, receives, number);
}

// On the root's node all ranks get the data first. Then each lane is sent in slices, one to each
// other node, and the nodes exchange these: so the root's node sends no more than about twice the
// data, to however many nodes.
void Group::broadcast(void* data, std::size_t count, DataType type, int root) {
  const Call call(*this,
                  {.operation = Operation::broadcast, .type = type, .root = root, .count = count});
  const Division division = divide(count, type);
  const int source = map_.node_of(root);
  const bool has_data = map_.node() == source;
  if (has_data) local_.broadcast(data, count, type, map_.local_rank_of(root));

  const Slice lane = division.lane(local_.rank());
  std::byte* const lane_data = address(data) + lane.begin * division.element_size;
  // The source has none: it would have to send it to all.
  const auto slice_for = [&](int node) {
    return shm::slice_of(lane.count(), division.element_size, node - (node > source ? 1 : 0),
                         map_.nodes() - 1);
  };
  Messages first_sends;
  Messages first_receives;
  Messages sends;
  Messages receives;
  const auto message = [&](int node, const Slice& slice) {
    return slice_message(node, lane_data, slice, division.element_size);
  };
  for (int node = 0; node < map_.nodes() && lane.count() > 0; ++node) {
    if (node == map_.node() || node == source) continue;
    const Slice theirs = slice_for(node);
    if (has_data) {
      if (theirs.count() > 0) first_sends.push_back(message(node, theirs));
      continue;
    }
    const Slice own = slice_for(map_.node());
    if (own.count() > 0) sends.push_back(message(node, own));
    if (theirs.count() > 0) receives.push_back(message(node, theirs));
  }
  if (!has_data && lane.count() > 0) {
    const Slice own = slice_for(map_.node());
    if (own.count() > 0) first_receives.push_back(message(source, own));
  }
  exchange(first_sends, first_receives, 0);
  exchange(sends, receives, 1);
  if (!has_data) share_lanes(division, address(data), type);
}

void Group::gather(Input input, std::span<const Output> outputs, DataType type, int root) {
  const Call call(
      *this, {.operation = Operation::gather, .type = type, .root = root, .count = input.count});
  const std::size_t bytes = input.count * element_size(type);
  Messages sends;
  Messages receives;
  if (map_.node() != map_.node_of(root)) {
    if (bytes > 0) sends.push_back({root, address(input.data), bytes});
    return exchange(sends, receives, 0);
  }
  const bool is_root = rank() == root;
  for (int from = 0; is_root && bytes > 0 && from < size(); ++from) {
    if (map_.node_of(from) == map_.node()) continue;
    receives.push_back({from, address(outputs[static_cast<std::size_t>(from)].data), bytes});
  }
  const auto here = local_parts(is_root ? outputs : std::span<const Output>());
  local_.gather(input, here, type, map_.local_rank_of(root));
  exchange(sends, receives, 0);
}

void Group::scatter(std::span<const Input> inputs, Output output, DataType type, int root) {
  const Call call(
      *this, {.operation = Operation::scatter, .type = type, .root = root, .count = output.count});
  const std::size_t bytes = output.count * element_size(type);
  Messages sends;
  Messages receives;
  if (map_.node() != map_.node_of(root)) {
    if (bytes > 0) receives.push_back({root, address(output.data), bytes});
    return exchange(sends, receives, 0);
  }
  const bool is_root = rank() == root;
  for (int to = 0; is_root && bytes > 0 && to < size(); ++to) {
    if (map_.node_of(to) == map_.node()) continue;
    sends.push_back({to, address(inputs[static_cast<std::size_t>(to)].data), bytes});
  }
  const auto here = local_parts(is_root ? inputs : std::span<const Input>());
  local_.scatter(here, output, type, map_.local_rank_of(root));
  exchange(sends, receives, 0);
}

// The ranks of a node gather their parts. Then each sends a lane of them to the other nodes, and
// they gather the lanes that they have got.
void Group::all_gather(Input input, std::span<const Output> outputs, DataType type) {
  const bool uneven = std::ranges::any_of(
      outputs, [&](const Output& output) { return output.count != input.count; });
  const OwnSplits splits = uneven ? splits_of({&input, 1}, outputs) : OwnSplits();
  const Call call(*this,
                  {.operation = Operation::all_gather,
                   .type = type,
                   .uneven = static_cast<std::uint8_t>(uneven),
                   .count = uneven ? 0 : input.count},
                  uneven ? &splits : nullptr);
  const std::size_t element = element_size(type);
  local_.all_gather(input, local_parts(outputs), type);

  std::vector<std::vector<Output>> parts;  // by node
  std::vector<Division> blocks;            // of their bytes
  for (int node = 0; node < map_.nodes(); ++node) {
    auto& of_node = parts.emplace_back();
    for (const int rank : map_.ranks_on(node)) {
      of_node.push_back(outputs[static_cast<std::size_t>(rank)]);
    }
    blocks.push_back(divide(bytes_of(std::span<const Output>(of_node), element), DataType::byte));
  }
  // A lane of the blocks of all other nodes, one after the other.
  const auto lanes_size = [&](int lane) {
    std::size_t bytes = 0;
    for (int node = 0; node < map_.nodes(); ++node) {
      if (node != map_.node()) bytes += blocks[static_cast<std::size_t>(node)].lane(lane).count();
    }
    return bytes;
  };
  std::vector<std::size_t> sizes;
  std::size_t total = 0;
  for (int lane = 0; lane < local_.size(); ++lane) total += sizes.emplace_back(lanes_size(lane));
  const Memory received = allocate(total);  // by lane
  std::vector<Output> lanes;
  for (std::size_t before = 0; const std::size_t bytes : sizes) {
    lanes.push_back({received.get() + before, bytes});
    before += bytes;
  }

  const int own_lane = local_.rank();
  const auto own_node = static_cast<std::size_t>(map_.node());
  const Slice own_bytes = blocks[own_node].lane(own_lane);
  const Memory own = allocate(own_bytes.count());
  visit_bytes(std::span<const Output>(parts[own_node]), element, own_bytes,
              [&](std::span<std::byte> piece, std::size_t offset) {
                std::memcpy(own.get() + offset, piece.data(), piece.size());
              });
  Messages sends;
  Messages receives;
  auto* next = static_cast<std::byte*>(lanes[static_cast<std::size_t>(own_lane)].data);
  for (int node = 0; node < map_.nodes(); ++node) {
    if (node == map_.node()) continue;
    const std::size_t bytes = blocks[static_cast<std::size_t>(node)].lane(own_lane).count();
    if (own_bytes.count() > 0) sends.push_back({lane_peer(node), own.get(), own_bytes.count()});
    if (bytes > 0) receives.push_back({lane_peer(node), next, bytes});
    next += bytes;
  }
  exchange(sends, receives, 0);
  const Output own_lanes = lanes[static_cast<std::size_t>(own_lane)];
  local_.all_gather({own_lanes.data, own_lanes.count}, lanes, DataType::byte);

  for (int lane = 0; lane < local_.size(); ++lane) {
    const auto* from = static_cast<const std::byte*>(lanes[static_cast<std::size_t>(lane)].data);
    for (int node = 0; node < map_.nodes(); ++node) {
      if (node == map_.node()) continue;
      const auto at = static_cast<std::size_t>(node);
      const Slice bytes = blocks[at].lane(lane);
      visit_bytes(std::span<const Output>(parts[at]), element, bytes,
                  [&](std::span<std::byte> piece, std::size_t offset) {
                    std::memcpy(piece.data(), from + offset, piece.size());
                  });
      from += bytes.count();
    }
  }
}

void Group::all_to_all(std::span<const Input> inputs, std::span<const Output> outputs,
                       DataType type) {
  const OwnSplits splits = splits_of(inputs, outputs);
  const Call call(*this, {.operation = Operation::all_to_all, .type = type, .uneven = 1}, &splits);
  local_.all_to_all(local_parts(inputs), local_parts(outputs), type);
  Messages sends;
  Messages receives;
  for (int peer = 0; peer < size(); ++peer) {
    if (map_.node_of(peer) == map_.node()) continue;
    const Input& input = inputs[static_cast<std::size_t>(peer)];
    const Output& output = outputs[static_cast<std::size_t>(peer)];
    const std::size_t element = element_size(type);
    if (input.count > 0) sends.push_back({peer, address(input.data), input.count * element});
    if (output.count > 0) receives.push_back({peer, address(output.data), output.count * element});
  }
  exchange(sends, receives, 0);
}

}  // namespace paceline::internode
