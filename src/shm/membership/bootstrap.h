#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "shm/membership/exchange.h"
#include "shm/membership/failure.h"

namespace paceline::shm {

// One rank as seen from another: a descriptor that becomes readable or hangs up when its process
// has ended. A pidfd if the process is visible from here. Otherwise the read end of a pipe whose
// other end only that process and its forked children hold open.
struct Peer {
  base::UniqueFd watch;  // none for the rank itself, and between threads of one process
  pid_t pid = 0;         // 0 if not visible

  bool ended() const;
};

// What a rank holds once it has joined a group.
struct Membership {
  base::UniqueFd memory;    // the group's shared memory
  std::vector<Peer> peers;  // by rank
  base::UniqueFd
      own_liveness;  // the write end of this rank's pipe: to be kept as long as the rank lives
};

// At the deadline rank 0 knows which ranks are missing; the others wait this much longer for its
// verdict.
inline constexpr std::chrono::milliseconds kVerdict{500};

// Unix seqpacket sockets that lead to rank 0: rank 0 has one for each other rank, in order, every
// other rank has one.
using BootstrapSockets = std::vector<base::UniqueFd>;

// Forms a group of the ranks at the ends of `sockets`: rank 0 makes `memory_bytes` of shared memory
// and hands it out together with the means to watch every rank. `global_ranks` is for messages.
// Throws PeerLost, Timeout or Mismatch naming the ranks that were lost, did not come, or expect
// another group size or memory.
Membership join(BootstrapSockets sockets, int rank, int size, std::size_t memory_bytes,
                const base::Deadline& deadline, const GlobalRanks& global_ranks);

// The same for ranks that only have an Exchange: they connect to an abstract socket of rank 0.
// Throws UsageError if they do not all run on one machine.
Membership join(Exchange& exchange, std::size_t memory_bytes, const base::Deadline& deadline,
                const GlobalRanks& global_ranks);

}  // namespace paceline::shm
