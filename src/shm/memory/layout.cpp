#include "shm/memory/layout.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include <paceline/error.h>

#include "shm/memory/arena.h"

namespace paceline::shm {
namespace {

// docs/collectives.md explains this limit.
constexpr std::size_t kMaxBuffer = std::size_t{1} << 20;

std::size_t check_size(int size) {
  if (size >= 1 && size <= kMaxRanks) return static_cast<std::size_t>(size);
  throw UsageError(
      fmt::format("a group of {} ranks on one machine: 1 to {} are allowed", size, kMaxRanks));
}

std::size_t buffer_size(std::size_t ranks, std::size_t staging_bytes) {
  const std::size_t share = staging_bytes / (Layout::kStagingBuffers * ranks);
  return std::clamp(share / kPage * kPage, kPage, kMaxBuffer);
}

// Twice a rank's share of the machine's memory: not all ranks use theirs at once. All of the memory
// for each rank would exhaust the address space with many ranks, and 2 TiB for each group with many
// groups.
std::size_t default_arena(std::size_t ranks) {
  const std::size_t memory = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                             static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  constexpr std::size_t kMostOfGroup = std::size_t{1} << 40;
  return std::min({memory, memory / ranks * 2, kMostOfGroup / ranks});
}

}  // namespace

Layout::Layout(int size, std::size_t staging_bytes, std::size_t arena_bytes)
    : ranks_(check_size(size)),
      buffer_(buffer_size(ranks_, staging_bytes)),
      stride_(round_up(sizeof(RankBlock), kPage) + kStagingBuffers * buffer_ +
              round_up(ranks_ * sizeof(SendRing), kPage)),
      default_arena_(arena_bytes == 0),
      arena_(round_up(arena_bytes != 0 ? arena_bytes : default_arena(ranks_), kPage)),
      first_rank_(round_up(sizeof(GroupBlock), kPage)),
      arenas_(first_rank_ + ranks_ * stride_) {}

Layout Layout::in(std::size_t bytes) const {
  Layout result = *this;
  if (default_arena_ && bytes > arenas_) result.arena_ = (bytes - arenas_) / ranks_;
  if (result.total() == bytes && result.arena_ % kPage == 0) return result;
  throw Error(
      fmt::format("the shared memory offered by rank 0 has {} bytes, not {}", bytes, total()));
}

std::size_t Layout::staging_buffer(int rank, std::size_t buffer) const {
  return rank_block(rank) + round_up(sizeof(RankBlock), kPage) + buffer * buffer_;
}

bool Layout::is_in_arena(int rank, std::size_t offset, std::size_t bytes) const {
  const std::size_t begin = arena(rank);
  return offset >= begin && offset - begin <= arena_ && bytes <= arena_ - (offset - begin);
}

}  // namespace paceline::shm
