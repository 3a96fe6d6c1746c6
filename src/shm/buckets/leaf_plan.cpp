#include "shm/buckets/leaf_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

#include <paceline/error.h>

namespace paceline::shm {
namespace {

std::vector<LeafRange> one_leaf_each(int ranks) {
  std::vector<LeafRange> ranges;
  for (int rank = 0; rank < ranks; ++rank) ranges.push_back({rank, 1});
  return ranges;
}

// The largest node that begins with the range.
int first_part(const LeafRange& range) {
  const auto first = static_cast<unsigned>(range.first);
  const int most = static_cast<int>(std::bit_floor(static_cast<unsigned>(range.count)));
  return first == 0 ? most : std::min(most, 1 << std::countr_zero(first));
}

}  // namespace

LeafPlan::LeafPlan(int ranks) {
  set(one_leaf_each(ranks), Parts::fewest);
}

LeafPlan::LeafPlan(std::vector<LeafRange> ranges, Parts parts) {
  set(std::move(ranges), parts);
  if (parts_.size() > kMaxSources) {
    throw UsageError(fmt::format("{} leaves on {} ranks are {} sums; {} are allowed", leaves_,
                                 ranges_.size(), parts_.size(), kMaxSources));
  }
}

bool LeafPlan::is_rank_order() const {
  for (std::size_t rank = 0; rank < ranges_.size(); ++rank) {
    if (!std::cmp_equal(ranges_[rank].first, rank)) return false;
  }
  return one_each();
}

void LeafPlan::set(std::vector<LeafRange> ranges, Parts parts) {
  ranges_ = std::move(ranges);
  first_.resize(ranges_.size());
  std::vector<std::size_t> by_leaf(ranges_.size());
  std::iota(by_leaf.begin(), by_leaf.end(), 0);
  std::ranges::sort(by_leaf, {}, [&](std::size_t rank) { return ranges_[rank].first; });
  for (const std::size_t rank : by_leaf) {
    LeafRange rest = ranges_[rank];
    if (rest.first != leaves_ || rest.count < 1) {
      throw UsageError(fmt::format(
          "rank {} has the leaves [{}, {}), where one of the ranks must begin with leaf {}: each "
          "leaf must be in one rank's range, and no range may be empty",
          rank, rest.first, rest.first + rest.count, leaves_));
    }
    leaves_ += rest.count;
    most_leaves_ = std::max(most_leaves_, rest.count);
    first_[rank] = parts_.size();
    for (std::size_t part = 0; rest.count > 0; ++part) {
      const bool keeps_last = parts == Parts::last_leaf_apart && rest.count > 1;
      const int size = first_part({rest.first, keeps_last ? rest.count - 1 : rest.count});
      parts_.push_back({rest.first, size});
      first_leaves_.push_back(rest.first);
      sources_.push_back({static_cast<int>(rank), part});
      rest = {rest.first + size, rest.count - size};
      most_parts_ = std::max(most_parts_, part + 1);
    }
  }
}

LeafPlan LeafPlan::even(int leaves, int ranks, Parts parts) {
  std::vector<LeafRange> ranges;
  int first = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int count = leaves / ranks + (rank < leaves % ranks ? 1 : 0);
    ranges.push_back({first, count});
    first += count;
  }
  return LeafPlan(std::move(ranges), parts);
}

std::span<const LeafRange> LeafPlan::parts(int rank) const {
  const std::size_t first = first_[static_cast<std::size_t>(rank)];
  std::size_t end = first;
  while (end < sources_.size() && sources_[end].rank == rank) ++end;
  return std::span(parts_).subspan(first, end - first);
}

double LeafPlan::weight_of(int rank, std::span<const double> weights) const {
  const auto [first, count] = range(rank);
  if (weights.empty()) return count;
  const auto own = weights.begin() + first;
  return std::accumulate(own, own + count, 0.0);
}

void LeafPlan::average(DataType type, std::span<const void* const> sources,
                       std::span<const double> weights, double divisor,
                       std::span<void* const> destinations, std::size_t count) const {
  decltype(Kernels::reduce) reduce_terms = shm::complete;
  if (part_type(type) == type) reduce_terms = shm::reduce;
  if (weights.empty()) {
    Terms terms{.sources = sources};
    if (!one_each()) terms.leaves = first_leaves_;
    return reduce_terms(type, ReduceOp::avg, terms, divisor, destinations, count);
  }
  std::array<const void*, kMaxSources> counted;
  std::array<double, kMaxSources> factors;
  std::array<int, kMaxSources> leaves;
  std::size_t used = 0;
  for (std::size_t k = 0; k < parts_.size(); ++k) {
    const auto of_part = weights.subspan(static_cast<std::size_t>(parts_[k].first),
                                         static_cast<std::size_t>(parts_[k].count));
    if (std::ranges::all_of(of_part, [](double weight) { return weight == 0; })) continue;
    counted[used] = sources[k];
    factors[used] = of_part.size() == 1 ? of_part[0] : 1;
    leaves[used++] = parts_[k].first;
  }
  const Terms terms{std::span(counted).first(used), std::span(factors).first(used),
                    std::span(leaves).first(used)};
  reduce_terms(type, ReduceOp::avg, terms, divisor, destinations, count);
}

}  // namespace paceline::shm
