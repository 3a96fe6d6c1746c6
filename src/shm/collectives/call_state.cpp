#include "shm/collectives/call_state.h"

#include <algorithm>
#include <optional>

namespace paceline::shm {
namespace {

// What a rank published last.
struct Published {
  std::uint32_t round = 0;
  std::optional<CollectiveFingerprint> call{};  // none if it was overwritten meanwhile
};

// A rank writes a slot again only after it has published a round in the other one. So the copy is
// whole if that has not happened after it. A read-modify-write, which the copy cannot pass.
Published read_last(const Region& region, int rank) {
  Published last;
  for (int tries = 0; tries < 3 && !last.call; ++tries) {
    Slot& even = region.memory().slot(rank, 0);
    Slot& odd = region.memory().slot(rank, 1);
    const bool even_is_last =
        Region::reached(even.round, odd.round.load(std::memory_order_acquire));
    const Slot& slot = even_is_last ? even : odd;
    last.round = slot.round.load(std::memory_order_acquire);
    const CollectiveFingerprint call = copy_call(region, rank, last.round);
    const std::uint32_t other =
        (even_is_last ? odd : even).round.fetch_add(0, std::memory_order_acq_rel);
    if (static_cast<std::int32_t>(other - last.round) <= 0) last.call = call;
  }
  return last;
}

__attribute__((no_sanitize("thread"))) CollectiveFingerprint copy_of(
    const CollectiveFingerprint& call) {
  return call;
}

}  // namespace

CollectiveFingerprint copy_call(const Region& region, int rank, std::uint32_t round) {
  const CollectiveFingerprint outer = copy_of(region.memory().outer_call(rank, round));
  return outer.across_nodes ? outer : copy_of(region.memory().slot(rank, round).call);
}

std::vector<CallState> read_call_states(const Region& region) {
  std::vector<Published> published;
  for (int rank = 0; rank < region.size(); ++rank) published.push_back(read_last(region, rank));
  std::vector<CallState> states;
  for (int rank = 0; rank < region.size(); ++rank) {
    const Published& own = published[static_cast<std::size_t>(rank)];
    CallState state{.rank = region.global_ranks().of(rank)};
    if (own.call) {
      state.call = own.call->sequence;
      if (state.call > 0) state.operation = describe(*own.call, region.global_ranks());
    }
    state.waits = std::ranges::any_of(published, [&](const Published& other) {
      return static_cast<std::int32_t>(other.round - own.round) < 0;
    });
    states.push_back(std::move(state));
  }
  return states;
}

}  // namespace paceline::shm
