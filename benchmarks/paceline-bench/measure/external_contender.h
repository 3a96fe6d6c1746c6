#pragma once

#include <string>

#include "measure/external_peer.h"
#include "measure/rounds.h"

namespace paceline::bench {

// Rank 0 alone runs the program, which starts ranks of its own.
Contender external_contender(PeerProgram program, int calls);

}  // namespace paceline::bench
