#include "shm/collectives/cross_wait.h"

namespace paceline::shm {
namespace {

// The slot that the rank published last.
const Slot& last_slot(const Region& region, int rank) {
  const Slot& even = region.memory().slot(rank, 0);
  const Slot& odd = region.memory().slot(rank, 1);
  return Region::reached(even.round, odd.round.load(std::memory_order_acquire)) ? even : odd;
}

}  // namespace

std::optional<CollectiveFingerprint> call_without_this_rank(const Region& region, int peer) {
  const Slot& theirs = last_slot(region, peer);
  const std::uint32_t round = theirs.round.load(std::memory_order_acquire);
  if (Region::reached(last_slot(region, region.rank()).round, round)) return std::nullopt;
  return region.memory().call(peer, round);
}

RankSet ranks_behind(const Region& region) {
  const std::uint32_t own = last_slot(region, region.rank()).round.load(std::memory_order_acquire);
  RankSet behind;
  for (int rank = 0; rank < region.size(); ++rank) {
    if (!Region::reached(last_slot(region, rank).round, own)) behind.insert(rank);
  }
  return behind;
}

std::optional<CollectiveFingerprint> cross_call(Region& region, int peer) {
  const auto call = call_without_this_rank(region, peer);
  // Read after the round: threads are noted before it.
  const auto& threads = region.threads();
  return threads.is_one(region.rank()) && threads.is_one(peer) ? call : std::nullopt;
}

}  // namespace paceline::shm
