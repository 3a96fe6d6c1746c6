#include "shm/memory/region_memory.h"

namespace paceline::shm {

RegionMemory::RegionMemory(std::shared_ptr<Mapping> mapping, const Layout& layout, int rank)
    : mapping_(std::move(mapping)),
      layout_(layout),
      rank_(rank),
      arena_(layout.arena(rank), layout.arena_bytes()) {}

void* RegionMemory::allocate(std::size_t bytes, std::size_t alignment) {
  if (group_block().failure.present() || process_.is_forked_child()) return nullptr;
  const auto offset = arena_.allocate(bytes, alignment);
  return offset ? at<void>(*offset) : nullptr;
}

void RegionMemory::free(void* pointer) {
  if (!process_.is_forked_child()) arena_.free(offset_of(pointer));
}

void RegionMemory::retire(void* pointer) {
  if (!process_.is_forked_child()) arena_.retire(offset_of(pointer));
}

bool RegionMemory::holds(const void* pointer, std::size_t bytes) const {
  return arena_.holds(offset_of(pointer), bytes);
}

// Accepts any pointer: one below the region wraps to an offset that no arena contains.
std::size_t RegionMemory::offset_of(const void* pointer) const {
  return reinterpret_cast<std::uintptr_t>(pointer) -
         reinterpret_cast<std::uintptr_t>(mapping_->data());
}

std::optional<std::uint64_t> RegionMemory::shared_offset(const void* pointer,
                                                         std::size_t bytes) const {
  const std::size_t offset = offset_of(pointer);
  if (!layout_.is_in_arena(rank_, offset, bytes)) return std::nullopt;
  return offset;
}

std::byte* RegionMemory::resolve(int peer, std::uint64_t offset, std::size_t bytes) const {
  return layout_.is_in_arena(peer, offset, bytes) ? at<std::byte>(offset) : nullptr;
}

}  // namespace paceline::shm
