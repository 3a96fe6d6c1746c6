#include "shm/membership/rank_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace paceline::shm {

RankSet RankSet::all(int size) {
  RankSet ranks;
  for (int rank = 0; rank < size; ++rank) ranks.insert(rank);
  return ranks;
}

int RankSet::count() const {
  int count = 0;
  for (const std::uint64_t word : words_) count += std::popcount(word);
  return count;
}

RankSet& RankSet::operator|=(const RankSet& other) {
  std::ranges::transform(words_, other.words_, words_.begin(), std::bit_or<>());
  return *this;
}

RankSet& RankSet::operator-=(const RankSet& other) {
  std::ranges::transform(words_, other.words_, words_.begin(),
                         [](std::uint64_t mine, std::uint64_t theirs) { return mine & ~theirs; });
  return *this;
}

int RankSet::at_or_after(int rank) const {
  while (rank < kMaxWorldSize) {
    const std::uint64_t rest = word(rank) >> (rank % kBits);
    if (rest != 0) return rank + std::countr_zero(rest);
    rank = (rank / kBits + 1) * kBits;
  }
  return kMaxWorldSize;
}

std::string describe_ranks(const RankSet& ranks) {
  const int count = ranks.count();
  if (count == 0) return "no rank";
  std::vector<std::string> parts;
  int named = 0;
  for (auto rank = ranks.begin(); rank != ranks.end() && parts.size() < kMaxListed;) {
    const int first = *rank;
    int last = first;
    const bool in_ranges = count > static_cast<int>(kMaxListed);
    for (++rank; rank != ranks.end() && in_ranges && *rank == last + 1; ++rank) ++last;
    parts.push_back(first == last ? fmt::to_string(first) : fmt::format("{}-{}", first, last));
    named += last - first + 1;
  }
  if (named < count) parts.push_back(fmt::format("{} more", count - named));
  if (parts.size() == 1) return (count == 1 ? "rank " : "ranks ") + parts[0];
  return fmt::format("ranks {} and {}", fmt::join(parts.begin(), parts.end() - 1, ", "),
                     parts.back());
}

}  // namespace paceline::shm
