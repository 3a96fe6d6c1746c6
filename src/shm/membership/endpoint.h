#pragma once

#include <sys/types.h>

#include <string>

namespace paceline::shm {

// Two processes with the same one can share memory: they run on one machine, in one network
// namespace.
std::string machine_identity();

// Names this process's pid namespace: process ids are the same in processes with the same one.
std::string pid_namespace();

// What a rank sends to the others through the Exchange.
struct Endpoint {
  pid_t pid;
  std::string pids;  // the namespace in which it has that number
  std::string machine;
  std::string socket;  // rank 0's, where the others connect

  // This process's; a random socket if it `listens`.
  static Endpoint own(bool listens);
  std::string encode() const;
  // Throws Error unless the record is an encoded Endpoint.
  static Endpoint decode(const std::string& text);
};

}  // namespace paceline::shm
