#include "internode/node_map.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

namespace paceline::internode {

NodeMap::NodeMap(std::span<const int> nodes, int rank) : rank_(rank) {
  std::map<int, int> numbers;
  for (const int given : nodes) {
    const int node = numbers.emplace(given, static_cast<int>(numbers.size())).first->second;
    if (node == this->nodes()) nodes_.emplace_back();
    auto& ranks = nodes_[static_cast<std::size_t>(node)].ranks;
    places_.push_back({node, static_cast<int>(ranks.size())});
    ranks.push_back(size() - 1);
  }
  lanes_ = size();
  for (const Node& one : nodes_) lanes_ = std::min(lanes_, static_cast<int>(one.ranks.size()));
  add_parts(0, static_cast<int>(std::bit_ceil(nodes.size())));
}

// Those below the node of the tree that has the leaves from `first` on, `leaves` of them if there
// are so many.
void NodeMap::add_parts(int first, int leaves) {
  if (first >= size()) return;
  const int end = std::min(first + leaves, size());
  const int node = node_of(first);
  Part part;
  for (int rank = first; rank < end && node_of(rank) == node; ++rank) part.ranks.push_back(rank);
  if (static_cast<int>(part.ranks.size()) == end - first) {
    nodes_[static_cast<std::size_t>(node)].parts.push_back(std::move(part));
  } else {
    add_parts(first, leaves / 2);
    add_parts(first + leaves / 2, leaves / 2);
  }
}

}  // namespace paceline::internode
