#pragma once

#include "distributed/process_state.h"
#include "distributed/topology.h"

namespace paceline::distributed {

using Place = Placement::Variables;

// Where this process runs. Without a world, and in a world of one, which may be a part of what a
// launcher started, by the launcher.
Place place_in(const ActiveWorld* world);

}  // namespace paceline::distributed
