#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace paceline::internode {

// On which nodes the ranks of a group run, seen from one of them. Ranks are group ranks. Nodes are
// numbered from 0 in the order of their first ranks.
class NodeMap {
 public:
  // `nodes`: the node of each rank, in any numbering.
  NodeMap(std::span<const int> nodes, int rank);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(places_.size()); }
  int nodes() const { return static_cast<int>(nodes_.size()); }
  int node() const { return node_of(rank_); }
  int local_rank() const { return local_rank_of(rank_); }
  bool is_leader() const { return local_rank() == 0; }

  int node_of(int rank) const { return place(rank).node; }
  int local_rank_of(int rank) const { return place(rank).local; }
  // Ascending, never empty. The first is the node's leader.
  const std::vector<int>& ranks_on(int node) const { return at(node).ranks; }
  const std::vector<int>& here() const { return ranks_on(node()); }
  int leader_of(int node) const { return ranks_on(node).front(); }
  int rank_at(int node, int local_rank) const {
    return ranks_on(node)[static_cast<std::size_t>(local_rank)];
  }
  // How many ranks of a node exchange data with other nodes at the same time: as many as the
  // smallest node has.
  int lanes() const { return lanes_; }

  // A node of the tree in whose order reductions add (shm/kernels/tree.h), of whose leaves, the
  // ranks, all run on one machine.
  struct Part {
    std::vector<int> ranks;  // ascending
    int first_leaf() const { return ranks.front(); }
  };
  // What a node can add up by itself: as few parts as possible, ascending.
  const std::vector<Part>& parts(int node) const { return at(node).parts; }

 private:
  struct Place {
    int node;
    int local;
  };
  struct Node {
    std::vector<int> ranks;
    std::vector<Part> parts;
  };
  const Place& place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  const Node& at(int node) const { return nodes_[static_cast<std::size_t>(node)]; }
  void add_parts(int first, int leaves);

  int rank_;
  int lanes_;
  std::vector<Place> places_;  // by rank
  std::vector<Node> nodes_;
};

}  // namespace paceline::internode
