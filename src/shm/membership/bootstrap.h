#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "shm/membership/endpoint.h"
#include "shm/membership/exchange.h"
#include "shm/membership/failure.h"
#include "shm/membership/socket.h"

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

// The shared memory of a group, in bytes.
struct GroupMemory {
  std::size_t total;   // which rank 0 makes
  std::size_t agreed;  // which every rank must expect, see Layout::agreed
};

// At the deadline rank 0 knows which ranks are missing; the others wait this much longer for its
// verdict.
inline constexpr std::chrono::milliseconds kVerdict{500};

// Unix seqpacket sockets that lead to rank 0: rank 0 has one for each other rank, in order, every
// other rank has one.
using BootstrapSockets = std::vector<base::UniqueFd>;

// Forms a group of the ranks at the ends of `sockets`: rank 0 makes the shared memory and
// hands it out together with the means to watch every rank. `global_ranks` is for messages.
// Throws PeerLost, Timeout or Mismatch naming the ranks that were lost, did not come, or expect
// another group size or memory.
Membership join(BootstrapSockets sockets, int rank, int size, const GroupMemory& memory,
                const base::Deadline& deadline, const GlobalRanks& global_ranks);

// Where a rank listens for the other ranks of one group, from before they know each other.
struct ListeningEndpoint {
  Endpoint endpoint = Endpoint::own(true);
  base::UniqueFd listener = listen_abstract(endpoint.socket);
};

// The same for ranks that have each other's endpoints, in the order of ranks: they connect to rank
// 0's, whose `listener` it is; the other ranks need none. `group` identifies the group: a rank that
// gives another one is a Mismatch. Throws UsageError if they do not all run on one machine.
Membership join(const std::vector<Endpoint>& endpoints, int rank, base::UniqueFd listener,
                std::uint64_t group, const GroupMemory& memory, const base::Deadline& deadline,
                const GlobalRanks& global_ranks);

// The same for ranks that only have an Exchange.
Membership join(Exchange& exchange, const GroupMemory& memory, const base::Deadline& deadline,
                const GlobalRanks& global_ranks);

}  // namespace paceline::shm
