#pragma once

#include <span>
#include <vector>

#include "shm/kernels/kernels.h"

namespace paceline::shm {

// The leaves first, first + 1, ... of a Tree.
struct LeafRange {
  int first = 0;
  int count = 1;

  bool operator==(const LeafRange&) const = default;
};

// Which leaves of a bucket's average each rank has. A rank with several adds up its values of each
// *part*, a node of 2^k leaves, and publishes the sums.
class LeafPlan {
 public:
  // The parts of a range: as few as possible; or the same without its last leaf, which is a part of
  // its own. If its values can be read where they are, adding them up beforehand would cost one
  // more pass over memory.
  enum class Parts { fewest, last_leaf_apart };

  // Leaf r is rank r's. For any number of ranks; average() takes kMaxSources at most.
  explicit LeafPlan(int ranks);
  // By rank. Throws UsageError unless each leaf from 0 on is in one range, no range is empty, and
  // they have kMaxSources parts at most.
  explicit LeafPlan(std::vector<LeafRange> ranges, Parts parts = Parts::fewest);
  // In the order of ranks; the ranges' sizes differ by one at most, larger ones come first.
  static LeafPlan even(int leaves, int ranks, Parts parts = Parts::fewest);

  int leaves() const { return leaves_; }
  LeafRange range(int rank) const { return ranges_[static_cast<std::size_t>(rank)]; }
  // The most leaves that a rank has.
  int most_leaves() const { return most_leaves_; }
  bool one_each() const { return most_leaves_ == 1; }
  // Whether leaf r is rank r's, and there is no other.
  bool is_rank_order() const;

  // Of one rank, ascending.
  std::span<const LeafRange> parts(int rank) const;
  std::size_t most_parts() const { return most_parts_; }
  // The type of a part's values in a bucket of `type`.
  DataType part_type(DataType type) const { return one_each() ? type : accumulation_type(type); }

  // The sum of the weights of a rank's leaves. `weights`: by leaf; empty if all are 1.
  double weight_of(int rank, std::span<const double> weights) const;

  // All parts, in the order of leaves.
  struct Source {
    int rank;
    std::size_t part;  // of the rank
  };
  std::span<const Source> sources() const { return sources_; }

  // Writes the average of `count` elements to every destination. `sources`: the values of each of
  // sources(), of part_type(type); a part whose weights are all 0 is not read. `weights`: by leaf;
  // empty if all are 1. The values of a part of several leaves are multiplied by them already.
  // `divisor`: their sum.
  void average(DataType type, std::span<const void* const> sources, std::span<const double> weights,
               double divisor, std::span<void* const> destinations, std::size_t count) const;

 private:
  void set(std::vector<LeafRange> ranges, Parts parts);

  std::vector<LeafRange> ranges_;  // by rank
  std::vector<LeafRange> parts_;   // by source, as are the next two
  std::vector<int> first_leaves_;
  std::vector<Source> sources_;
  std::vector<std::size_t> first_;  // by rank: its first source
  int leaves_ = 0;
  int most_leaves_ = 0;
  std::size_t most_parts_ = 0;
};

}  // namespace paceline::shm
