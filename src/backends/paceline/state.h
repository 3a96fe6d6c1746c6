#pragma once

#include <string>

#include "shm/buckets/bucket_reducer.h"
#include "shm/collectives/group.h"
#include "shm/p2p/mailbox.h"

namespace paceline::backends {

// Objects of JSON, for debuggers: base::StateSource. Safe to call on any thread.

// A group: its ranks, where each is in the collectives, this rank's messages under way.
std::string describe_group(const shm::Region& region, const shm::Mailbox& mailbox);
// The step of a bucket reducer.
std::string describe_step(const shm::ControlBlocks& blocks);

}  // namespace paceline::backends
