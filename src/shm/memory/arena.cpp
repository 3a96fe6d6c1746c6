#include "shm/memory/arena.h"

#include <algorithm>
#include <iterator>

namespace paceline::shm {

Arena::Arena(std::size_t begin, std::size_t size) {
  if (size > 0) free_.emplace(begin, size);
}

std::optional<std::size_t> Arena::allocate(std::size_t bytes, std::size_t alignment) {
  std::lock_guard lock(mutex_);
  if (bytes > SIZE_MAX - alignment) return std::nullopt;
  const std::size_t size = std::max(alignment, round_up(bytes, alignment));
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& one) {
    const std::size_t skipped = round_up(one.first, alignment) - one.first;
    return one.second >= skipped && one.second - skipped >= size;
  });
  if (found == free_.end()) return std::nullopt;
  const auto [begin, available] = *found;
  const std::size_t offset = round_up(begin, alignment);
  const std::size_t left = begin + available - (offset + size);
  free_.erase(found);
  if (offset > begin) free_.emplace(begin, offset - begin);
  if (left > 0) free_.emplace(offset + size, left);
  used_.emplace(offset, size);
  bytes_in_use_ += size;
  return offset;
}

void Arena::free(std::size_t offset) {
  std::lock_guard lock(mutex_);
  const auto used = used_.find(offset);
  if (used == used_.end()) return;
  bytes_in_use_ -= used->second;
  auto block = free_.insert(used_.extract(used)).position;
  if (const auto next = std::next(block);
      next != free_.end() && block->first + block->second == next->first) {
    block->second += next->second;
    free_.erase(next);
  }
  if (block != free_.begin()) {
    const auto previous = std::prev(block);
    if (previous->first + previous->second == block->first) {
      previous->second += block->second;
      free_.erase(block);
    }
  }
}

void Arena::retire(std::size_t offset) {
  std::lock_guard lock(mutex_);
  const auto used = used_.find(offset);
  if (used == used_.end()) return;
  bytes_in_use_ -= used->second;
  used_.erase(used);
}

bool Arena::holds(std::size_t offset, std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  const auto used = used_.find(offset);
  return used != used_.end() && used->second >= bytes;
}

std::size_t Arena::bytes_in_use() const {
  std::lock_guard lock(mutex_);
  return bytes_in_use_;
}

}  // namespace paceline::shm
