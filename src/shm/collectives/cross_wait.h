#pragma once

#include <optional>

#include "shm/region.h"

namespace paceline::shm {

// The call that `peer` has begun and waits for this rank in, if this rank has not begun one too.
// For a thread before whose return this rank begins none.
std::optional<CollectiveFingerprint> call_without_this_rank(const Region& region, int peer);

// The call in which `peer` waits for this rank, which waits for it in another way, if both will
// wait for ever: if each of them has one thread that deals with the group.
std::optional<CollectiveFingerprint> cross_call(Region& region, int peer);

}  // namespace paceline::shm
