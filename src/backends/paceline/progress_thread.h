#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace paceline::backends {

// Runs tasks one at a time, in the order they came: those that wait on a thread that exists once
// the first of them has come, the others on the caller's own thread after all before them. Tasks
// must not throw.
class ProgressThread {
 public:
  using Task = std::function<void()>;

  ProgressThread() = default;
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;
  // Runs what is left in the queue first.
  ~ProgressThread() { stop(); }

  void enqueue(Task task);
  // Waits until everything enqueued so far has run, and keeps what comes later waiting meanwhile.
  template <typename Body>
  void run_here(Body&& body) {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return tasks_.empty() && !busy_; });
    body();
  }
  void stop();
  // Nothing may be enqueued any more.
  bool stopped() const { return stopping_; }

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable idle_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  std::atomic<bool> stopping_ = false;  // set under the mutex
  std::thread thread_;
};

}  // namespace paceline::backends
