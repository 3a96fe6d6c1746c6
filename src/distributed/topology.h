#pragma once

#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"

namespace paceline::distributed {

// Where a rank runs, as it reports it to the others.
struct Placement {
  // What its launcher says.
  struct Variables {
    int node;        // GROUP_RANK
    int local_rank;  // LOCAL_RANK; 0 for all ranks of a node that are virtual ones
    int local_size;  // LOCAL_WORLD_SIZE

    bool operator==(const Variables&) const = default;
  };
  std::optional<Variables> variables;
  std::string machine;      // ranks with the same one can share memory
  std::string host;         // its name, for messages
  std::vector<int> cpus{};  // that it may use; empty if unknown
  std::string cgroup{};     // see base::cpu_cgroup_identity

  // This process's. The launcher's variables are about the ranks of a world only if these are the
  // processes that it `launched`.
  static Placement own(const base::Environment& environment, bool launched);
  std::string encode() const;
  // Empty if `text` is not an encoded Placement.
  static std::optional<Placement> decode(const std::string& text);
};

// 0 to size - 1.
std::vector<int> every_rank(int size);

// On which nodes the ranks of a world run. Nodes and local ranks come from the launcher's variables
// if all ranks have them; on a node where torchrun or `paceline run` started them with
// --virtual-local-rank, all local ranks are 0. Else each machine is a node, in the order of their
// first ranks, and local ranks follow the ranks.
class Topology {
 public:
  // From what the ranks say, by rank. Throws UsageError naming the ranks whose variables contradict
  // each other.
  explicit Topology(std::span<const Placement> placements);
  static Topology one_node(int size);
  // Whose local ranks are all 0.
  static Topology one_node_of_virtual_ranks(int size);

  int size() const { return static_cast<int>(places_.size()); }
  int nodes() const { return static_cast<int>(nodes_.size()); }
  int node_of(int rank) const { return places_.at(static_cast<std::size_t>(rank)).node; }
  int local_rank_of(int rank) const { return places_.at(static_cast<std::size_t>(rank)).local; }
  // In ascending order; never empty.
  const std::vector<int>& ranks_on(int node) const { return at(node).ranks; }
  int local_size(int node) const { return static_cast<int>(ranks_on(node).size()); }
  int leader_of(int node) const { return ranks_on(node).front(); }
  // The name of its machine; empty if the ranks did not exchange it.
  const std::string& host_of(int node) const { return at(node).host; }
  // The cores that the ranks of a node may use together; 0 if unknown.
  int cores_of(int node) const { return static_cast<int>(at(node).cpus.size()); }
  // Whether no two ranks of a node may use the same core.
  bool has_cores_apart(int node) const { return at(node).cpus.size() == at(node).masks; }
  // How many ranks of this rank's node are in its control group, with itself.
  int in_cgroup_of(int rank) const;

  // The nodes of some ranks, in order.
  std::vector<int> nodes_of(std::span<const int> ranks) const;
  // "ranks 0 and 1 on node 0 (alpha), rank 2 on node 1 (beta)".
  std::string describe(std::span<const int> ranks) const;
  // Where its nodes come from: "GROUP_RANK" or "machine".
  const char* source() const { return by_variables_ ? "GROUP_RANK" : "machine"; }

 private:
  struct Node {
    std::vector<int> ranks;
    std::string host;
    std::set<int> cpus;
    std::size_t masks = 0;  // the sizes of its ranks' masks, added up
  };
  struct Place {
    int node;
    int local;
    std::string cgroup;
  };
  const Node& at(int node) const { return nodes_.at(static_cast<std::size_t>(node)); }

  bool by_variables_;
  std::vector<Node> nodes_;
  std::vector<Place> places_;  // by rank
};

}  // namespace paceline::distributed
