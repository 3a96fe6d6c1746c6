#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <vector>

namespace paceline::shm {

// How many ranks a job may have.
inline constexpr int kMaxWorldSize = 1024;

// A set of group ranks or of global ranks; iterates in order.
class RankSet {
  static constexpr int kBits = 64;

 public:
  // A bit for each rank, the lowest first.
  using Words = std::array<std::uint64_t, kMaxWorldSize / kBits>;

  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = int;
    using difference_type = std::ptrdiff_t;
    using pointer = const int*;
    using reference = int;

    Iterator() = default;
    Iterator(const RankSet* set, int rank) : set_(set), rank_(set->at_or_after(rank)) {}
    int operator*() const { return rank_; }
    Iterator& operator++() { return *this = Iterator(set_, rank_ + 1); }
    Iterator operator++(int) {
      const Iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const Iterator&) const = default;

   private:
    const RankSet* set_ = nullptr;
    int rank_ = kMaxWorldSize;
  };

  RankSet() = default;
  RankSet(std::initializer_list<int> ranks) {
    for (const int rank : ranks) insert(rank);
  }
  explicit RankSet(std::span<const int> ranks) {
    for (const int rank : ranks) insert(rank);
  }
  explicit RankSet(const Words& words) : words_(words) {}
  // Ranks 0 to `size` - 1.
  static RankSet all(int size);

  // Leaves out numbers that are not ranks of any world: a damaged peer may name anything.
  void insert(int rank) {
    if (is_rank(rank)) word(rank) |= bit(rank);
  }
  bool contains(int rank) const { return is_rank(rank) && (word(rank) & bit(rank)) != 0; }
  bool empty() const { return *this == RankSet(); }
  int count() const;

  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, kMaxWorldSize}; }
  std::vector<int> list() const { return {begin(), end()}; }
  const Words& words() const { return words_; }

  RankSet& operator|=(const RankSet& other);
  RankSet& operator-=(const RankSet& other);
  friend RankSet operator|(RankSet a, const RankSet& b) { return a |= b; }
  friend RankSet operator-(RankSet a, const RankSet& b) { return a -= b; }
  bool operator==(const RankSet&) const = default;

 private:
  static bool is_rank(int rank) { return rank >= 0 && rank < kMaxWorldSize; }
  static std::uint64_t bit(int rank) { return std::uint64_t{1} << (rank % kBits); }
  std::uint64_t& word(int rank) { return words_[static_cast<std::size_t>(rank / kBits)]; }
  const std::uint64_t& word(int rank) const {
    return words_[static_cast<std::size_t>(rank / kBits)];
  }
  // kMaxWorldSize if there is none.
  int at_or_after(int rank) const;

  Words words_{};
};

// A RankSet in shared memory, not atomic as a whole: load() may mix words of several stores. Each
// word is stored with release and loaded with acquire.
class AtomicRankSet {
 public:
  void store(const RankSet& ranks) {
    for (std::size_t word = 0; word < words_.size(); ++word) {
      words_[word].store(ranks.words()[word], std::memory_order_release);
    }
  }
  RankSet load() const {
    RankSet::Words words;
    for (std::size_t word = 0; word < words.size(); ++word) {
      words[word] = words_[word].load(std::memory_order_acquire);
    }
    return RankSet(words);
  }

 private:
  std::array<std::atomic<std::uint64_t>, RankSet::Words().size()> words_;
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
};

// How many ranks, or ranges of ranks, a text lists; it counts the others.
inline constexpr std::size_t kMaxListed = 8;

// "no rank", "rank 1", "ranks 1 and 3", "ranks 1, 2 and 5"; more than kMaxListed ranks in ranges:
// "ranks 3-70, 80, 90-99 and 40 more".
std::string describe_ranks(const RankSet& ranks);
// The verb after it.
inline const char* has_or_have(const RankSet& ranks) {
  return ranks.count() == 1 ? "has" : "have";
}

// A bit for each rank of a region, which has at most kMaxRanks: for shared words and hot paths.
using LocalRankMask = std::uint64_t;
constexpr LocalRankMask local_rank_bit(int rank) {
  return LocalRankMask{1} << rank;
}

}  // namespace paceline::shm
