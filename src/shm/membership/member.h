#pragma once

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/failure.h"

namespace paceline::shm {

// Forms a group as another rank than 0, over the socket that leads there; see join.
Membership join_as_member(base::UniqueFd socket, const Hello& hello, const base::Deadline& deadline,
                          const GlobalRanks& global_ranks);

}  // namespace paceline::shm
