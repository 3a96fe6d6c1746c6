#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "shm/memory/arena.h"
#include "shm/memory/layout.h"
#include "shm/memory/mapping.h"
#include "shm/sync/fork_generation.h"

namespace paceline::shm {

// The memory of a group as one rank sees it: typed access to what Layout places, and this rank's
// allocations.
//
// Allocating, freeing and translating addresses are thread-safe. In a forked child allocation finds
// no room, and freeing does nothing.
class RegionMemory {
 public:
  RegionMemory(std::shared_ptr<Mapping> mapping, const Layout& layout, int rank);

  Mapping& mapping() const { return *mapping_; }
  GroupBlock& group_block() const { return *at<GroupBlock>(0); }
  RankBlock& rank_block(int rank) const { return *at<RankBlock>(layout_.rank_block(rank)); }
  CollectiveControl& collectives(int rank) const { return rank_block(rank).collectives; }
  Slot& slot(int rank, std::uint32_t round) const { return collectives(rank).slots[round % 2]; }
  CollectiveFingerprint& outer_call(int rank, std::uint32_t round) const {
    return collectives(rank).outer_calls[round % 2];
  }
  // What the rank's program called last when it published a round.
  CollectiveFingerprint call(int rank, std::uint32_t round) const {
    const CollectiveFingerprint outer = outer_call(rank, round);
    return outer.across_nodes ? outer : slot(rank, round).call;
  }
  Splits& splits(int rank, std::uint32_t round) const {
    return collectives(rank).splits[round % 2];
  }
  // The staging buffer of a round, of buffer_bytes().
  std::byte* staging(int rank, std::uint32_t round) const {
    return at<std::byte>(layout_.staging_buffer(rank, round % Layout::kStagingBuffers));
  }
  std::size_t buffer_bytes() const { return layout_.buffer_bytes(); }
  SendRing& send_ring(int from, int to) const { return at<SendRing>(layout_.send_rings(from))[to]; }

  // Shared memory of this rank, aligned as in Arena::allocate; nullptr if there is no room, and
  // after a failure of the group, since a late rank may still write to memory that it knew.
  void* allocate(std::size_t bytes, std::size_t alignment = Arena::kAlignment);
  void free(void* pointer);
  // For memory that a peer may still access: never handed out again, even if freed.
  void retire(void* pointer);
  // Whether a block of at least `bytes` bytes that was allocated here begins at `pointer`.
  bool holds(const void* pointer, std::size_t bytes) const;
  std::size_t bytes_in_use() const { return arena_.bytes_in_use(); }
  std::size_t capacity() const { return layout_.arena_bytes(); }

  // The offset of [pointer, pointer + bytes) in the region, if it is in this rank's arena.
  std::optional<std::uint64_t> shared_offset(const void* pointer, std::size_t bytes) const;
  // The memory at an offset that `peer` published; nullptr if that is not in the peer's arena.
  std::byte* resolve(int peer, std::uint64_t offset, std::size_t bytes) const;

 private:
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(mapping_->data() + offset);
  }
  std::size_t offset_of(const void* pointer) const;

  std::shared_ptr<Mapping> mapping_;
  Layout layout_;
  int rank_;
  Arena arena_;
  OwningProcess process_;
};

}  // namespace paceline::shm
