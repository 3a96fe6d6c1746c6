#pragma once

#include <optional>

#include "shm/region.h"

namespace paceline::shm {

// The call in which `peer` waits for this rank, if this rank has not begun it. Valid only on a
// thread that has to return before this rank can begin a call.
std::optional<CollectiveFingerprint> call_without_this_rank(const Region& region, int peer);

// The same for a rank that waits for `peer` outside of a call, if both wait for ever: if each uses
// the group from one thread only.
std::optional<CollectiveFingerprint> cross_call(Region& region, int peer);

// The local ranks that a call of this rank waits for, on any thread; none if it waits for none.
RankSet ranks_behind(const Region& region);

}  // namespace paceline::shm
