#pragma once

#include <sys/wait.h>

#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include "shm/membership/bootstrap.h"

namespace paceline::test {

// How a rank in a process of its own ended.
struct RankEnd {
  int status = 0;      // as waitpid returns it
  std::string report;  // the body's result, or "threw: " and the exception's text
  bool exited_cleanly() const { return status == 0; }
  bool killed() const { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
};

// Forks `size` processes with bootstrap sockets, as `paceline run` does, runs `body` in each and
// waits for all of them. If the body returns, the rank exits with 0 and reports the result. If the
// body throws or fails a gtest expectation, the rank exits with 1. After five minutes a rank is
// killed, and its report says so.
std::vector<RankEnd> run_process_ranks(
    int size, const std::function<std::string(int rank, shm::BootstrapSockets sockets)>& body);

// Runs bodies without a result, and expects every rank to exit cleanly.
void expect_process_ranks(int size,
                          const std::function<void(int rank, shm::BootstrapSockets sockets)>& body);

// Runs `body` for 0 to `count` - 1 at the same time, each in a process of its own, which may start
// ranks: for tests that mostly wait for a deadline. Expects every process to exit cleanly.
void run_side_by_side(std::size_t count, const std::function<void(std::size_t)>& body);

}  // namespace paceline::test
