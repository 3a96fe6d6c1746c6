#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "base/wait_report.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/failure.h"
#include "shm/membership/socket.h"

namespace paceline::shm {

// Rank 0's side of forming a group. Sockets may be known to lead to a rank from the start
// (inherited) or only once their hello has come (accepted).
class Coordinator {
 public:
  // `own`: as the others should say it. `memory_bytes`: of the group. `global_ranks` must outlive
  // the coordinator.
  Coordinator(const Hello& own, std::size_t memory_bytes, const base::Deadline& deadline,
              const GlobalRanks& global_ranks);

  void add_connection(base::UniqueFd socket, std::optional<int> rank);
  void accept_at(base::UniqueFd listener) { listener_ = std::move(listener); }
  // Watches a rank that has not connected yet.
  void expect(int rank, pid_t pid);

  Membership run();

 private:
  struct Connection {
    base::UniqueFd socket;
    std::optional<int> rank;
  };
  struct Expected {
    base::UniqueFd watch;  // none if the process is not visible
    int rank;
    pid_t pid;  // 0 likewise
  };

  std::optional<Failure> gather_some();
  std::optional<Failure> receive_hello(Connection& connection);
  bool is_of_another_attempt(const Hello& hello, const Packet& packet,
                             const Connection& connection) const;
  std::optional<Failure> check(const std::optional<Hello>& hello, const Packet& packet,
                               std::optional<int> from) const;
  void admit_latecomers();
  Failure gone(int rank) const;
  Failure too_late() const;
  RankSet missing() const;
  Failure missing(const std::string& when) const;
  void report_missing();
  void tell_all(const std::string& bytes, const std::vector<int>& fds);
  Membership welcome();

  Hello own_;
  std::size_t memory_bytes_;
  base::Deadline deadline_;
  base::WaitReport report_;
  const GlobalRanks& global_ranks_;
  base::UniqueFd listener_;
  std::vector<Connection> connections_;
  std::vector<Expected> expected_;
  std::optional<int> ended_;  // an expected rank without a process to watch
  std::vector<Peer> peers_;
  std::vector<bool> greeted_;
};

}  // namespace paceline::shm
