#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace paceline::shm {

inline constexpr std::size_t kPage = 4096;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Hands out offsets of one rank's part of a region: first fit, neighbours merged when freed. The
// book-keeping is private memory, so no peer can damage it. Thread-safe.
class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;

  Arena(std::size_t begin, std::size_t size);

  // The offset of `bytes` bytes, aligned to `alignment`, a power of 2 from kAlignment up; nullopt
  // if there is no room. The block ends at a multiple of it too. Memory is not cleared.
  std::optional<std::size_t> allocate(std::size_t bytes, std::size_t alignment = kAlignment);
  void free(std::size_t offset);
  // Whether a block of at least `bytes` bytes that is in use begins at `offset`.
  bool holds(std::size_t offset, std::size_t bytes) const;
  // Takes a block out of circulation for good; freeing it later does nothing.
  void retire(std::size_t offset);
  std::size_t bytes_in_use() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset -> size
  std::map<std::size_t, std::size_t> used_;
  std::size_t bytes_in_use_ = 0;
};

}  // namespace paceline::shm
