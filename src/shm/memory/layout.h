#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/collectives/control_block.h"
#include "shm/membership/failure.h"
#include "shm/membership/rank_set.h"
#include "shm/p2p/message_header.h"
#include "shm/sync/doorbell.h"
#include "shm/sync/joint_cores.h"

namespace paceline::shm {

// At the head of the region.
struct GroupBlock {
  FailureRecord failure;
  alignas(kCacheLine) JointCores cores;
  // RankBlock::awaited of global ranks on other nodes, as far as it is known here.
  alignas(kCacheLine) std::array<std::atomic<std::uint32_t>, kMaxWorldSize> awaited_elsewhere;
  // A bit for each global rank on another node that has left the group, as far as it is known here.
  std::array<std::atomic<std::uint64_t>, RankSet::Words().size()> left_elsewhere;
};

// At the head of each rank's part, before its staging buffers and send rings.
struct RankBlock {
  CollectiveControl collectives;
  alignas(kCacheLine) Word sleepers;  // how many sleep in the kernel for a word of this rank
  alignas(kCacheLine) Word departed;  // 1 once the rank has left in good order
  Word marked;                        // 1 once it has marked the memory as open: see Mapping
  // When a rank last reported in the log that this one is late, in the ticks of steady_clock.
  std::atomic<std::uint64_t> late_report;
  // 1 + the global rank that a thread of this one waits for; 0: none.
  std::atomic<std::uint32_t> awaited;
  // The bucket reducer whose buckets a thread of this rank waits for, by ControlBlocks::number();
  // 0: none. The local ranks that have not done what it waits for. And the number of this wait
  // (upper half), and how often it has looked at these ranks.
  std::atomic<std::uint64_t> awaited_reducer;
  std::atomic<LocalRankMask> awaited_ranks;
  std::atomic<std::uint64_t> awaited_looks;
  std::uint64_t mark;  // see CrossMemoryReader
  std::uint64_t mark_address;
  alignas(kCacheLine) Doorbell doorbell;
};

// The layout of the memory that the ranks of a group share:
//
//   GroupBlock | rank 0: RankBlock, staging buffers, send rings | rank 1: ... | arena 0 | arena 1 |
//
// A pure function of the group's size and options, but for arenas of the default size: that follows
// from the machine's memory, which may change between two ranks, so all take it from rank 0's
// memory.
class Layout {
 public:
  static constexpr std::size_t kStagingBuffers = 2;  // of each rank, used in turn

  // `staging_bytes`: the limit for the staging buffers of all ranks together. `arena_bytes`: what
  // each rank can allocate; 0 for as much as the machine has. Throws UsageError for an unsupported
  // size.
  Layout(int size, std::size_t staging_bytes, std::size_t arena_bytes);

  // The same in memory of `bytes` bytes, which rank 0 made. Throws Error if that does not fit.
  Layout in(std::size_t bytes) const;

  std::size_t total() const { return arenas_ + ranks_ * arena_; }
  // The part of it whose size every rank computes alike.
  std::size_t agreed() const { return default_arena_ ? arenas_ : total(); }
  std::size_t buffer_bytes() const { return buffer_; }
  std::size_t arena_bytes() const { return arena_; }

  // Offsets from the region's first byte.
  std::size_t rank_block(int rank) const { return first_rank_ + index(rank) * stride_; }
  std::size_t staging_buffer(int rank, std::size_t buffer) const;
  std::size_t send_rings(int rank) const { return staging_buffer(rank, kStagingBuffers); }
  std::size_t arena(int rank) const { return arenas_ + index(rank) * arena_; }
  // Whether [offset, offset + bytes) is in the rank's arena.
  bool is_in_arena(int rank, std::size_t offset, std::size_t bytes) const;

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  std::size_t ranks_;
  std::size_t buffer_;
  std::size_t stride_;
  bool default_arena_;
  std::size_t arena_;
  std::size_t first_rank_;
  std::size_t arenas_;
};

}  // namespace paceline::shm
