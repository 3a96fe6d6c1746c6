#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "measure/result.h"

namespace paceline::bench {

// What an ExternalPeer runs. `remedy` ends its errors: how to measure without it.
struct PeerProgram {
  std::string name;
  std::vector<std::string> command;
  std::string remedy;
};

// An implementation in processes of its own, which take turns with ours: they are started once and
// idle until asked. The program reads lines with a number of calls from its standard input, makes
// that many and answers each with a line of two numbers on its standard output: the mean time of a
// call in microseconds on the rank that took longest, and the CPU time of a call on all ranks. 0
// calls end it.
class ExternalPeer {
 public:
  // Enough for the start of Python and for the largest tensors.
  static constexpr std::chrono::minutes kTimeout{5};

  // Throws Error if it cannot be started.
  explicit ExternalPeer(PeerProgram program, std::chrono::milliseconds timeout = kTimeout);
  ExternalPeer(const ExternalPeer&) = delete;
  ExternalPeer& operator=(const ExternalPeer&) = delete;
  // Tells the program to end and waits for that; kills it if it does not end within the timeout.
  ~ExternalPeer();

  // Throws Error if the program has ended, says something else or does not answer within the
  // timeout. It is not running any more then.
  Sample measure(int calls);

 private:
  std::string read_line(const base::Deadline& deadline);
  // Ends the program and throws Error: its name, `what` and the remedy.
  [[noreturn]] void fail(const std::string& what);

  PeerProgram program_;
  std::chrono::milliseconds timeout_;
  base::UniqueFd input_;
  base::UniqueFd output_;
  std::string pending_;
  pid_t pid_ = -1;
};

std::string beside_this_program(const std::string& name);

// Whether `python` is a program that can import `module`.
bool can_import(const std::string& python, const std::string& module);

}  // namespace paceline::bench
