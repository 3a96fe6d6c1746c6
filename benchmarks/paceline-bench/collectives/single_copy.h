#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "measure/rounds.h"

namespace paceline::bench {

// A call of gather, scatter, all_to_all or send_recv in which each rank reads what it receives from
// the other ranks' memory with process_vm_readv(2): one copy by the receiver, as MPI libraries do
// it, between two barriers. Empty for other collectives, and where the system refuses it. `bytes`
// is the size of the largest tensor, as in measure_collective. Collective over the world.
std::optional<Contender> single_copy(const std::string& collective, std::int64_t bytes);

}  // namespace paceline::bench
