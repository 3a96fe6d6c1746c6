#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "measure/rounds.h"

namespace paceline::bench {

// An implementation in processes of its own, which take turns with ours: they are started once and
// idle until asked. The program reads lines with a number of calls from its standard input, makes
// that many and answers each with a line of two numbers on its standard output: the mean time of a
// call in microseconds on the rank that took longest, and the CPU time of a call on all ranks.
class ExternalPeer {
 public:
  // Throws Error if it cannot be started.
  explicit ExternalPeer(const std::vector<std::string>& command);
  ExternalPeer(const ExternalPeer&) = delete;
  ExternalPeer& operator=(const ExternalPeer&) = delete;
  // Ends the program by the end of its input, and waits for it.
  ~ExternalPeer();

  // Throws Error if the program has ended or says something else.
  Sample measure(int calls);

 private:
  std::string read_line();

  std::string name_;
  base::UniqueFd input_;
  base::UniqueFd output_;
  std::string pending_;
  pid_t pid_ = -1;
};

// `command` makes the command, on rank 0 alone.
Contender external_contender(std::string implementation, int calls,
                             const std::function<std::vector<std::string>()>& command);

std::string beside_this_program(const std::string& name);

// Built where MPI is found.
inline constexpr const char* kOpenMpiProgram = "paceline-bench-openmpi";

// Whether `python` is a program that can import `module`.
bool can_import(const std::string& python, const std::string& module);

}  // namespace paceline::bench
