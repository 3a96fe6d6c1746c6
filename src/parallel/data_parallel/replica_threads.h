#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace paceline::data_parallel {

// Threads that run one task at the same time.
class ReplicaThreads {
 public:
  using Task = std::function<void(std::size_t)>;

  // For tasks of up to `count` threads, the one that calls run() included.
  explicit ReplicaThreads(std::size_t count);
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;
  // Joins the threads. In a forked child, which does not have them, it does nothing.
  ~ReplicaThreads();

  // Calls task(0) on the calling thread and task(1) to task(count - 1) each on its own; these keep
  // their numbers in all calls. Returns once all have returned. The task must not throw. Throws
  // UsageError in a forked child.
  void run(std::size_t count, const Task& task);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  pid_t owner_;
};

}  // namespace paceline::data_parallel
