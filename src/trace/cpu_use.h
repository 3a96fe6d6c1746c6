#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace paceline::trace {

// CPU time of a process, in microseconds since a moment of its own.
struct CpuUse {
  std::int64_t wall = 0;
  std::int64_t used = 0;  // CPU time of all its threads
  // The time that the thread which started the timeline spent on a core, and ready to run without
  // one. It is mostly the thread that trains.
  std::int64_t running = 0;
  std::int64_t queued = 0;
};

// Reading it takes a system call and a small file of /proc.
class CpuMeter {
 public:
  // Starts now, for the calling thread. Useless in a forked child.
  CpuMeter();
  // May be called on any thread. Empty if the kernel does not report it, or the thread has ended.
  std::optional<CpuUse> read() const;

 private:
  std::optional<CpuUse> now() const;

  pid_t thread_;
  std::optional<CpuUse> begin_;
};

}  // namespace paceline::trace
