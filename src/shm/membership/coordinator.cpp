#include "shm/membership/coordinator.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/open_pidfd.h"
#include "base/pipe.h"
#include "shm/membership/endpoint.h"
#include "shm/membership/socket.h"
#include "shm/memory/mapping.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {

Coordinator::Coordinator(const Hello& own, std::size_t memory_bytes, const base::Deadline& deadline,
                         const GlobalRanks& global_ranks)
    : own_(own),
      memory_bytes_(memory_bytes),
      deadline_(deadline),
      global_ranks_(global_ranks),
      peers_(own.size),
      greeted_(own.size) {
  greeted_[0] = true;
}

void Coordinator::add_connection(base::UniqueFd socket, std::optional<int> rank) {
  want_credentials(socket.get());
  connections_.push_back({std::move(socket), rank});
}

void Coordinator::expect(int rank, pid_t pid) {
  base::UniqueFd watch = base::open_pidfd(pid);
  if (!watch && pid > 0 && errno == ESRCH) ended_ = rank;
  expected_.push_back({std::move(watch), rank, pid});
}

Membership Coordinator::run() {
  std::optional<Failure> failure;
  if (ended_) failure = lost_on_the_way(*ended_, global_ranks_);
  try {
    while (!failure && std::count(greeted_.begin(), greeted_.end(), false) > 0) {
      failure = gather_some();
    }
    if (!failure) return welcome();
    report_.abandon();
    if (failure->kind != FailureKind::timeout) admit_latecomers();
  } catch (const std::exception& error) {
    tell_all(encode(lost_on_the_way(0, global_ranks_, fmt::format(": {}", error.what()))), {});
    throw;
  }
  tell_all(encode(*failure), {});
  throw_failure(*failure, kConnecting);
}

std::optional<Failure> Coordinator::gather_some() {
  std::vector<int> fds{listener_.get()};
  for (const Connection& one : connections_) fds.push_back(one.socket.get());
  for (const Expected& one : expected_) fds.push_back(greeted_[one.rank] ? -1 : one.watch.get());
  const auto ready = wait_readable(fds, report_.next_check(deadline_));
  report_missing();
  if (std::find(ready.begin(), ready.end(), true) == ready.end()) {
    return deadline_.expired() ? std::optional(too_late()) : std::nullopt;
  }

  const std::size_t connections = connections_.size();
  for (std::size_t i = 0; i < connections; ++i) {
    if (!ready[1 + i]) continue;
    if (auto failure = receive_hello(connections_[i])) return failure;
  }
  if (ready[0]) {
    if (auto socket = accept_from_same_user(listener_.get())) {
      add_connection(std::move(socket), std::nullopt);
      return std::nullopt;  // what it sent before it ended, if it did, comes first
    }
  }
  for (std::size_t i = 0; i < expected_.size(); ++i) {
    if (ready[1 + connections + i] && !greeted_[expected_[i].rank] && !ready[0]) {
      return lost_on_the_way(expected_[i].rank, global_ranks_);
    }
  }
  return std::nullopt;
}

std::optional<Failure> Coordinator::receive_hello(Connection& connection) {
  Packet packet = receive_packet(connection.socket.get(), sizeof(Hello) + FailureRecord::kMaxText);
  if (packet.closed) {
    connection.socket.reset();
    return connection.rank ? std::optional(gone(*connection.rank)) : std::nullopt;
  }
  const auto hello = decode_hello(packet.bytes.substr(0, sizeof(Hello)));
  if (hello && is_of_another_attempt(*hello, packet, connection)) {
    connection.socket.reset();
    return std::nullopt;
  }
  if (auto failure = check(hello, packet, connection.rank)) return failure;
  connection.rank = hello->rank;
  greeted_[hello->rank] = true;
  base::UniqueFd pidfd = base::open_pidfd(packet.pid);
  peers_[hello->rank] = {pidfd ? std::move(pidfd) : std::move(packet.fds.front()), packet.pid};
  return std::nullopt;
}

// Ranks that have each other's endpoints may have connected before this rank began to join: for a
// group that they have given up since, or with ranks that this group does not have.
bool Coordinator::is_of_another_attempt(const Hello& hello, const Packet& packet,
                                        const Connection& connection) const {
  if (hello.protocol != kProtocol || hello.group == own_.group) return false;
  const bool expected = packet.pid == 0 || std::ranges::any_of(expected_, [&](const Expected& one) {
                          return one.pid == packet.pid || one.pid == 0;
                        });
  return !expected || has_hung_up(connection.socket.get());
}

// `from` is the rank that the connection is known to lead to.
std::optional<Failure> Coordinator::check(const std::optional<Hello>& hello, const Packet& packet,
                                          std::optional<int> from) const {
  if (hello && hello->protocol == kProtocol && hello->group != own_.group) {
    return Failure{FailureKind::mismatch,
                   {},
                   fmt::format("process {} and rank {} form different groups: their uuids or the "
                               "handles that they were given differ",
                               packet.pid, global_ranks_.of(0))};
  }
  const std::string reason = decode_reason(packet.bytes);
  if (!hello || packet.fds.size() != (reason.empty() ? 1 : 0) || hello->protocol != kProtocol ||
      hello->rank < 1 || hello->rank >= own_.size || greeted_[hello->rank] ||
      from.value_or(hello->rank) != hello->rank) {
    return Failure{FailureKind::mismatch, from ? RankSet{global_ranks_.of(*from)} : RankSet(),
                   "a process that wants to join the group speaks another version of Paceline, or "
                   "two ranks have the same number"};
  }
  if (!reason.empty()) return lost_on_the_way(hello->rank, global_ranks_, ": " + reason);
  if (hello->size != own_.size || hello->agreed_bytes != own_.agreed_bytes) {
    return Failure{FailureKind::mismatch,
                   {global_ranks_.of(hello->rank)},
                   fmt::format("rank {} forms a group of {} ranks with {} bytes of shared memory, "
                               "rank {} one of {} ranks with {} bytes",
                               global_ranks_.of(0), own_.size, own_.agreed_bytes,
                               global_ranks_.of(hello->rank), hello->size, hello->agreed_bytes)};
  }
  return std::nullopt;
}

// Ranks that have not connected yet must still receive the verdict.
void Coordinator::admit_latecomers() {
  const auto deadline = base::Deadline::after(kVerdict);
  const auto alive = [](const Expected& one) { return one.watch && !has_news(one.watch.get()); };
  const auto open = [](const Connection& one) {
    return one.socket && !has_hung_up(one.socket.get());
  };
  while (listener_ &&
         std::ranges::count_if(expected_, alive) > std::ranges::count_if(connections_, open)) {
    if (!wait_readable(listener_.get(), deadline)) return;
    if (auto socket = accept_from_same_user(listener_.get())) {
      add_connection(std::move(socket), std::nullopt);
    }
  }
}

// What it means that a rank closed its connection.
Failure Coordinator::gone(int rank) const {
  if (!greeted_[rank]) return lost_on_the_way(rank, global_ranks_);
  // A process closes its files before it counts as ended.
  const int watch = peers_[rank].watch.get();
  if (wait_readable(watch, base::Deadline::after(kVerdict)))
    return lost_on_the_way(rank, global_ranks_);
  return missing(fmt::format("before rank {} timed out", global_ranks_.of(rank)));
}

Failure Coordinator::too_late() const {
  return missing(fmt::format("within the timeout of {} s", deadline_.budget().count() / 1000.0));
}

// As global ranks.
RankSet Coordinator::missing() const {
  RankSet ranks;
  for (int rank = 0; rank < own_.size; ++rank) {
    if (!greeted_[rank]) ranks.insert(global_ranks_.of(rank));
  }
  return ranks;
}

Failure Coordinator::missing(const std::string& when) const {
  const RankSet ranks = missing();
  return {FailureKind::timeout, ranks,
          fmt::format("{} did not join the group {}", describe_ranks(ranks), when)};
}

void Coordinator::report_missing() {
  report_.check([&](const std::string& waited, auto) -> std::optional<base::WaitReport::Text> {
    const RankSet ranks = missing();
    return base::WaitReport::Text{
        fmt::format("rank {} has waited {} for {}, which {} not joined the group",
                    global_ranks_.of(0), waited, describe_ranks(ranks), has_or_have(ranks)),
        "forming the group"};
  });
}

void Coordinator::tell_all(const std::string& bytes, const std::vector<int>& fds) {
  fault_point();
  for (const Connection& one : connections_) {
    // A rank that has ended by now is detected by the next wait for it.
    if (one.socket) send_packet(one.socket.get(), bytes, fds, deadline_);
  }
}

Membership Coordinator::welcome() {
  Membership result;
  base::Pipe own = base::make_pipe();
  base::UniqueFd pidfd = base::open_pidfd(::getpid());
  peers_[0] = {pidfd ? std::move(pidfd) : std::move(own.read_end), ::getpid()};
  result.own_liveness = std::move(own.write_end);
  result.memory = Mapping::create_memory(memory_bytes_);

  Welcome welcome{{}, pid_namespace()};
  std::vector<int> fds{result.memory.get()};
  for (const Peer& peer : peers_) {
    welcome.pids.push_back(peer.pid);
    fds.push_back(peer.watch.get());
  }
  tell_all(encode(welcome), fds);
  peers_[0].watch.reset();
  result.peers = std::move(peers_);
  return result;
}

}  // namespace paceline::shm
