#include "shm/membership/bootstrap.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <utility>

#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/coordinator.h"
#include "shm/membership/endpoint.h"
#include "shm/membership/member.h"
#include "shm/membership/socket.h"

namespace paceline::shm {
namespace {

void check_one_machine(const std::vector<Endpoint>& endpoints, const GlobalRanks& global_ranks) {
  RankSet elsewhere;
  for (std::size_t rank = 1; rank < endpoints.size(); ++rank) {
    if (endpoints[rank].machine != endpoints[0].machine)
      elsewhere.insert(global_ranks.of(static_cast<int>(rank)));
  }
  if (elsewhere.empty()) return;
  throw UsageError(fmt::format(
      "{} run{} on another machine (or in another network namespace) than rank {}; shared "
      "memory reaches the ranks of one machine only. Use the backend gloo, or a build with "
      "libsodium and Gloo's headers, whose backend paceline reaches several machines.",
      describe_ranks(elsewhere), elsewhere.count() == 1 ? "s" : "", global_ranks.of(0)));
}

}  // namespace

bool Peer::ended() const {
  return watch && has_news(watch.get());
}

Membership join(BootstrapSockets sockets, int rank, int size, const GroupMemory& memory,
                const base::Deadline& deadline, const GlobalRanks& global_ranks) {
  if (sockets.size() != static_cast<std::size_t>(rank == 0 ? size - 1 : 1)) {
    throw UsageError(fmt::format("rank {} of {} has {} bootstrap sockets to the other ranks", rank,
                                 size, sockets.size()));
  }
  const Hello hello{.rank = rank, .size = size, .agreed_bytes = memory.agreed};
  if (rank > 0) return join_as_member(std::move(sockets.front()), 0, hello, deadline, global_ranks);
  Coordinator coordinator(hello, memory.total, deadline, global_ranks);
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    coordinator.add_connection(std::move(sockets[i]), static_cast<int>(i) + 1);
  }
  return coordinator.run();
}

Membership join(const std::vector<Endpoint>& endpoints, int rank, base::UniqueFd listener,
                std::uint64_t group, const GroupMemory& memory, const base::Deadline& deadline,
                const GlobalRanks& global_ranks) {
  check_one_machine(endpoints, global_ranks);
  const Hello hello{.rank = rank,
                    .size = static_cast<int>(endpoints.size()),
                    .agreed_bytes = memory.agreed,
                    .group = group};
  const auto visible_pid = [&](std::size_t other) {
    const auto& own = endpoints[static_cast<std::size_t>(rank)];
    return endpoints[other].pids == own.pids ? endpoints[other].pid : 0;
  };
  if (rank > 0) {
    base::UniqueFd socket = connect_abstract(endpoints[0].socket);
    if (!socket) throw_failure(lost_on_the_way(0, global_ranks), kConnecting);
    return join_as_member(std::move(socket), visible_pid(0), hello, deadline, global_ranks);
  }
  Coordinator coordinator(hello, memory.total, deadline, global_ranks);
  coordinator.accept_at(std::move(listener));
  for (std::size_t other = 1; other < endpoints.size(); ++other) {
    coordinator.expect(static_cast<int>(other), visible_pid(other));
  }
  return coordinator.run();
}

Membership join(Exchange& exchange, const GroupMemory& memory, const base::Deadline& deadline,
                const GlobalRanks& global_ranks) {
  const int rank = exchange.rank();
  const Endpoint mine = Endpoint::own(rank == 0);
  base::UniqueFd listener;
  if (rank == 0) listener = listen_abstract(mine.socket);
  std::vector<Endpoint> endpoints;
  for (const auto& blob : exchange.all_gather(mine.encode(), deadline)) {
    endpoints.push_back(Endpoint::decode(blob));
  }
  return join(endpoints, rank, std::move(listener), 0, memory, deadline, global_ranks);
}

}  // namespace paceline::shm
