#pragma once

#include <sys/types.h>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/failure.h"

namespace paceline::shm {

// Forms a group as another rank than 0, over the socket that leads there; see join. `rank_0`: its
// process, or 0. A forked child of it may keep the socket's other end open.
Membership join_as_member(base::UniqueFd socket, pid_t rank_0, const Hello& hello,
                          const base::Deadline& deadline, const GlobalRanks& global_ranks);

}  // namespace paceline::shm
