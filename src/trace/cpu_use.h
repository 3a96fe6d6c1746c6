#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "base/unique_fd.h"
#include "trace/span.h"

namespace paceline::trace {

// What the kernel has counted since a moment of its own; times are in microseconds.

inline constexpr std::int64_t kUnknown = -1;  // the kernel does not report it

// Of a process and its machine.
struct CpuUse {
  std::int64_t wall = 0;
  std::int64_t used = 0;  // CPU time of all its threads
  // The time that the thread which started the timeline spent on a core, and ready to run without
  // one. It is mostly the thread that trains.
  std::int64_t running = 0;
  std::int64_t queued = 0;

  Clock::time_point at{};
  std::int64_t periods = kUnknown;    // of the CPU limit of its cgroup, as base::Throttling has it
  std::int64_t throttled = kUnknown;  // of these, in how many the limit stopped it
  // CPU time of all processes, without interrupts, on the cores that it may run on.
  std::int64_t busy = kUnknown;
  std::int64_t stolen = kUnknown;           // from these cores, by the host of a virtual machine
  std::int64_t machine = kUnknown;          // as `busy`, on all cores
  std::int64_t cpu_pressure = kUnknown;     // while any task of the machine waited for a core
  std::int64_t memory_pressure = kUnknown;  // while any task of the machine waited for memory
};

// Of a thread.
struct ThreadUse {
  Clock::time_point at{};
  std::int64_t cpu = 0;
  std::int64_t queued = kUnknown;  // ready to run without a core
  std::int64_t preempted = 0;      // involuntary context switches, also sched_yield's
  std::int64_t faults = 0;         // page faults that read from a disk
};

// Reading it takes system calls and some small files of /proc.
class CpuMeter {
 public:
  // Starts now, for the calling thread. Useless in a forked child.
  CpuMeter();
  // For another process and its main thread.
  explicit CpuMeter(pid_t process);
  // May be called on any thread, by one at a time. Empty if the kernel does not report it, or the
  // thread has ended.
  std::optional<CpuUse> read();

 private:
  CpuMeter(pid_t process, pid_t thread);
  std::optional<CpuUse> now() const;

  pid_t process_;  // 0: this one
  pid_t thread_;
  std::vector<int> cores_;
  std::optional<CpuUse> begin_;
  // Between two readings, those of the group that was stopped most often count.
  std::vector<base::Throttling> groups_;
  std::int64_t periods_ = kUnknown;
  std::int64_t throttled_ = kUnknown;
};

// Of the thread that makes it, which alone may read it.
class ThreadMeter {
 public:
  ThreadMeter();
  bool is_of_this_thread() const { return thread_ == std::this_thread::get_id(); }
  // Three system calls: 2 us.
  ThreadUse read() const noexcept;

 private:
  std::thread::id thread_;
  base::UniqueFd schedstat_;
};

// Decides which steps are sampled. Ignores all threads but the first that calls it.
class ThreadSampler {
 public:
  enum class Moment { begin, end };
  // Call at the begin and the end of a step. In a millisecond it samples only the first step that
  // begins.
  std::optional<ThreadUse> sample(Moment moment) noexcept;

 private:
  std::optional<ThreadMeter> meter_;
  Clock::time_point next_{};
  bool sampled_begin_ = false;
};

}  // namespace paceline::trace
