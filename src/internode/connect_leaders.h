#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <string>

#include "base/deadline.h"
#include "internode/node_links.h"
#include "internode/node_map.h"
#include "shm/membership/exchange.h"
#include "shm/membership/failure.h"

namespace paceline::internode {

// While a group forms, how much longer than its timeout leaders wait for each other: a node may
// need its whole timeout to learn which of its ranks is late, and may be a little behind on a busy
// machine.
inline constexpr std::chrono::seconds kFormationGrace{4};
// The same for ranks that wait for their leader, which has to find out who is late.
inline constexpr std::chrono::seconds kLeaderGrace = 2 * kFormationGrace;

struct LeaderOptions {
  std::string group;         // its name, for messages
  std::string host;          // this machine's address by which the other leaders reach it
  shm::GlobalRanks ranks{};  // of the NodeMap's ranks, for messages
  // Throws if it is known that the leaders will not all come; asked while waiting for them.
  std::function<void()> check_peers = [] {};
};

// Connects this node's leader to all others. Collective over the leaders: `exchange` has a rank for
// each node. Node 0 makes a secret and gives it to the others in the exchange, so that nobody else
// can take part. Each listens at its host's address at a free port, only meanwhile, and ignores
// strangers. Throws Timeout, naming the leaders that did not connect, another leader's failure, and
// Error.
NodeLinks::Connections connect_leaders(shm::Exchange& exchange, const NodeMap& map,
                                       const LeaderOptions& options,
                                       const base::Deadline& deadline);

// What the other leaders throw if this one, `rank`, fails for a reason of its own.
shm::Failure own_failure(const shm::GlobalRanks& ranks, int rank, const std::exception& error);

// Instead of connect_leaders, if the ranks of this node have failed to meet: the other leaders
// throw this failure.
void report_to_leaders(shm::Exchange& exchange, const shm::Failure& failure) noexcept;

}  // namespace paceline::internode
