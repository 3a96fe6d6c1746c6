#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace paceline::trace {

// How a process gets on with its cores, in microseconds since a moment of its own.
struct CpuUse {
  std::int64_t wall = 0;
  std::int64_t used = 0;  // CPU time of all its threads
  // Of the thread that started the timeline, which mostly is the one that trains: on a core, and
  // ready to run while others had it.
  std::int64_t running = 0;
  std::int64_t queued = 0;
};

// Reads it: a system call and a small file of /proc.
class CpuMeter {
 public:
  // From now on, of the calling thread. In a forked child it measures nothing of use.
  CpuMeter();
  // On any thread. Nothing if the kernel does not tell, or the thread has ended.
  std::optional<CpuUse> read() const;

 private:
  std::optional<CpuUse> now() const;

  pid_t thread_;
  std::optional<CpuUse> begin_;
};

}  // namespace paceline::trace
