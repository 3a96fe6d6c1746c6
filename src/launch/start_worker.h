#pragma once

#include <sys/types.h>

#include <array>
#include <csignal>
#include <string>
#include <vector>

namespace paceline::launch {

// One worker, ready to be started.
struct Worker {
  std::string file;  // what to execute
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::array<int, 3> standard{};  // become descriptors 0, 1 and 2
  std::vector<int> inherited;     // stay open under their numbers; all others do not
};

struct Started {
  pid_t pid = -1;
  int error = 0;  // an errno if the worker could not be started
};

// Starts it as the leader of a process group of its own with the signal mask `mask`. It gets
// SIGKILL when the calling thread ends. Returns once the program runs, or cannot.
Started start_worker(const Worker& worker, const sigset_t& mask);

}  // namespace paceline::launch
