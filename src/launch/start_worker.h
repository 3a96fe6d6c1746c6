#pragma once

#include <sys/types.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace paceline::launch {

// One worker, ready to be started.
struct Worker {
  std::string file;  // to execute
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::array<int, 3> standard{};  // become descriptors 0, 1 and 2
  std::vector<int> inherited;     // stay open under their numbers; all others do not
  std::vector<int> cpus;          // its affinity mask; empty: this process's
  bool own_session = true;        // it leads a session, and a process group, of its own
  std::filesystem::path error_file;
  int error_memory = -1;  // inherited too: for an error that cannot be written there; -1: none
  int replaced_error_memory = -1;  // not inherited: keeps that of the last one replaced; -1: none
};

// Starts it with the signal mask `mask`. It gets SIGKILL when the calling thread ends. `created` is
// called with its process id before the program begins. Returns once the program runs, with 0, or
// cannot, with an errno; then there is no process.
//
// This process may have other threads. If it handles signals, the caller has to block them.
int start_worker(const Worker& worker, const sigset_t& mask,
                 const std::function<void(pid_t)>& created);

}  // namespace paceline::launch
