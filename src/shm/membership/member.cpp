#include "shm/membership/member.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <exception>
#include <utility>
#include <vector>

#include "base/errno_error.h"
#include "base/open_pidfd.h"
#include "base/pipe.h"
#include "base/wait_report.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/endpoint.h"
#include "shm/membership/socket.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {
namespace {

// Not if rank 0 has received the hello: it then reports which ranks are missing. Where ranks
// inherit their sockets they do not know of each other.
void report_rank_0(base::WaitReport& report, int socket, int rank,
                   const GlobalRanks& global_ranks) {
  report.check([&](const std::string& waited, auto) -> std::optional<base::WaitReport::Text> {
    if (rank > base::WaitReport::kStrangers || !has_unread_packets(socket)) return std::nullopt;
    return base::WaitReport::Text{
        fmt::format("rank {} has waited {} for rank {}, which has not begun to form the group",
                    global_ranks.of(rank), waited, global_ranks.of(0)),
        "forming the group"};
  });
}

// Waits for rank 0's answer; throws if there is none, or a failure.
Packet receive_answer(int socket, pid_t rank_0, int rank, const base::Deadline& deadline,
                      const GlobalRanks& global_ranks) {
  const auto verdict = base::Deadline::after(deadline.remaining() + kVerdict);
  base::WaitReport report;
  const base::UniqueFd watch = base::open_pidfd(rank_0);
  const bool has_ended = !watch && rank_0 > 0 && errno == ESRCH;
  std::vector<bool> ready{false, has_ended};
  while (!ready[0] && !ready[1] && !verdict.expired()) {
    ready = wait_readable(std::array{socket, watch.get()}, report.next_check(verdict));
    if (!ready[0] && !ready[1]) report_rank_0(report, socket, rank, global_ranks);
  }
  // Rank 0 may have answered, left the group and ended after the socket was looked at.
  if (!ready[0] && ready[1] && !has_news(socket)) {
    throw_failure(lost_on_the_way(0, global_ranks), kConnecting);
  }
  if (!ready[0] && !ready[1]) {
    throw_failure({FailureKind::timeout,
                   {global_ranks.of(0)},
                   fmt::format("rank {} did not form the group within the timeout of {} s",
                               global_ranks.of(0), deadline.budget().count() / 1000.0)},
                  kConnecting);
  }
  Packet packet = receive_packet(socket, 2 * FailureRecord::kMaxText);
  if (packet.closed) throw_failure(lost_on_the_way(0, global_ranks), kConnecting);
  if (const auto failure = decode_failure(packet.bytes)) throw_failure(*failure, kConnecting);
  return packet;
}

// This rank's pipe, if there is also room for the descriptors that come with the welcome: once a
// rank has received that, it cannot tell rank 0 that it lacks them.
base::Pipe open_descriptors(int size) {
  base::Pipe own = base::make_pipe();
  std::vector<base::UniqueFd> room;
  while (static_cast<int>(room.size()) < size) {  // the memory's replaces the pipe's read end
    room.emplace_back(::fcntl(own.read_end.get(), F_DUPFD_CLOEXEC, 0));
    if (!room.back()) throw base::errno_error("cannot receive descriptors over a Unix socket");
  }
  return own;
}

}  // namespace

Membership join_as_member(base::UniqueFd socket, pid_t rank_0, const Hello& hello,
                          const base::Deadline& deadline, const GlobalRanks& global_ranks) {
  base::Pipe own;
  try {
    own = open_descriptors(hello.size);
  } catch (const std::exception& error) {
    send_packet(socket.get(), encode(hello, error.what()), {}, deadline);
    throw;
  }
  const std::array<int, 1> mine{own.read_end.get()};
  fault_point();
  // If rank 0 is gone, there will be no answer.
  send_packet(socket.get(), encode(hello), mine, deadline);
  own.read_end.reset();

  Packet packet = receive_answer(socket.get(), rank_0, hello.rank, deadline, global_ranks);
  const auto welcome = decode_welcome(packet.bytes, hello.size);
  if (!welcome || packet.fds.size() != 1 + welcome->pids.size()) {
    throw_failure({FailureKind::mismatch,
                   {global_ranks.of(0)},
                   fmt::format("rank {} speaks another version of Paceline", global_ranks.of(0))},
                  kConnecting);
  }
  Membership result;
  result.memory = std::move(packet.fds.front());
  result.own_liveness = std::move(own.write_end);
  // In another namespace these numbers mean other processes.
  const bool visible = welcome->pid_namespace == pid_namespace();
  for (std::size_t i = 0; i < welcome->pids.size(); ++i) {
    Peer peer;
    if (static_cast<int>(i) != hello.rank) peer.watch = std::move(packet.fds[1 + i]);
    if (visible) peer.pid = welcome->pids[i];
    result.peers.push_back(std::move(peer));
  }
  return result;
}

}  // namespace paceline::shm
