#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <vector>

#include <paceline/data_parallel.h>

#include "parallel/data_parallel/replica_threads.h"

namespace paceline::data_parallel {

// What runs the replicas of a DataParallel. Outputs share it, for their backwards.
class ReplicaTeam {
 public:
  using Task = ReplicaThreads::Task;
  using Duration = DataParallelStats::Duration;

  // One replica on each device.
  explicit ReplicaTeam(std::vector<at::Device> devices);

  const std::vector<at::Device>& devices() const { return devices_; }
  DataParallelStats& stats() { return stats_; }

  // Runs the task of the first `count` replicas at the same time, in the thread-local state of the
  // calling thread, among whose intra-op threads they are divided. Adds what each takes to `time`.
  // Throws what the first one threw, with its number and device, once all have ended. Call it while
  // a Use lives.
  void run(std::size_t count, Duration DataParallelStats::Replica::*time, const Task& task);

  // Exclusive use of the replicas.
  class Use {
   public:
    // Throws UsageError if another one lives.
    explicit Use(ReplicaTeam& team);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { team_.in_use_ = false; }

   private:
    ReplicaTeam& team_;
  };

 private:
  [[noreturn]] void rethrow(const std::exception_ptr& error, std::size_t replica) const;

  std::vector<at::Device> devices_;
  DataParallelStats stats_;
  std::atomic<bool> in_use_ = false;
  ReplicaThreads threads_;
};

// Adds the time for which it lives to `total`.
class Stopwatch {
 public:
  using Duration = DataParallelStats::Duration;

  explicit Stopwatch(Duration& total) : total_(total) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    total_ += std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now() - begin_);
  }

 private:
  Duration& total_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace paceline::data_parallel
