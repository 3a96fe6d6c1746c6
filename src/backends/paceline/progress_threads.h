#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline::backends {

// Runs tasks one at a time, in order: enqueued ones on a progress thread, which the first of them
// starts; run_here on the caller's thread, after all tasks before it. Tasks must not throw.
//
// A task may return work to do after it, such as the callbacks of a future. That work may wait for
// later tasks: another thread runs those.
class ProgressThreads {
 public:
  using After = std::function<void()>;  // may be empty
  using Task = std::function<After()>;

  ProgressThreads() = default;
  ProgressThreads(const ProgressThreads&) = delete;
  ProgressThreads& operator=(const ProgressThreads&) = delete;
  // Runs the rest of the queue first.
  ~ProgressThreads() { stop(); }

  void enqueue(Task task);
  // Runs `body` after everything enqueued so far; later tasks wait for it.
  template <typename Body>
  void run_here(Body&& body) {
    const Turn turn(*this);
    body();
  }
  // How many tasks have been enqueued, or have begun to run here.
  std::uint64_t count();
  // Whether one of the first `count` tasks runs or is queued; work after tasks does not count.
  bool is_busy_with(std::uint64_t count);
  // Whether nothing runs or is queued, work after tasks included.
  bool is_idle();
  // Also waits for the work after tasks, unless that work calls it.
  void stop();
  // Whether the work after a task called stop(), so that its thread was detached: it still runs,
  // and uses this.
  bool detached() const { return detached_; }
  // No more tasks may be enqueued.
  bool stopped() const { return stopping_; }

 private:
  // The caller's turn to run something, from its constructor to its destructor.
  class Turn {
   public:
    explicit Turn(ProgressThreads& threads);
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn();

   private:
    ProgressThreads& threads_;
  };

  struct Numbered {
    Task task;
    std::uint64_t number;
  };

  void provide_thread();
  void loop();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable idle_;
  std::deque<Numbered> tasks_;
  std::uint64_t count_ = 0;
  bool running_ = false;                // a task, or a caller
  std::uint64_t running_number_ = 0;    // its number
  std::atomic<bool> stopping_ = false;  // set under the mutex
  std::size_t free_ = 0;                // threads that wait for a task, or run one
  std::size_t loops_ = 0;               // threads that have not ended
  std::atomic<bool> detached_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace paceline::backends
