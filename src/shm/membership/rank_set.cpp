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
  std::string text = count == 1 ? "rank" : "ranks";
  int nth = 0;
  for (const int rank : ranks) {
    const char* const before = nth == 0 ? " " : nth + 1 == count ? " and " : ", ";
    text += fmt::format("{}{}", before, rank);
    ++nth;
  }
  return text;
}

}  // namespace paceline::shm
