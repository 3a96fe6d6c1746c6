#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "shm/membership/bootstrap.h"

namespace paceline::test {

// How a rank that was a process of its own ended.
struct RankEnd {
  int status = 0;      // as waitpid gives it
  std::string report;  // what the body returned, or "threw: " and the exception's text
  bool exited_cleanly() const { return status == 0; }
};

// Forks `size` processes with links to each other, as `paceline run` would, runs `body` in each and
// waits for all of them. A rank whose body returns exits with 0 and reports what it returned; one
// whose body throws, or fails a gtest expectation, exits with 1. One that has not ended after five
// minutes is killed and its report says so.
std::vector<RankEnd> run_process_ranks(
    int size, const std::function<std::string(int rank, shm::BootstrapSockets links)>& body);

// For bodies that return nothing: expects every rank to exit cleanly.
void expect_process_ranks(int size,
                          const std::function<void(int rank, shm::BootstrapSockets links)>& body);

// Runs `body` for 0 to `count` - 1 at the same time, each in a process of its own, which may run
// ranks: for tests that spend their time on waiting for a deadline. Every process must exit
// cleanly.
void run_side_by_side(std::size_t count, const std::function<void(std::size_t)>& body);

}  // namespace paceline::test
