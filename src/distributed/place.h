#pragma once

#include "distributed/process_state.h"
#include "distributed/topology.h"

namespace paceline::distributed {

using Place = Placement::Variables;

// Where this process runs. Without a world, the launcher's variables decide. They also do in a
// world of one, since a launcher may have started more processes than that.
Place place_in(const ActiveWorld* world);

}  // namespace paceline::distributed
