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

// Runs tasks one at a time, in the order they came: those that wait on a thread that exists once
// the first of them has come, the others on the caller's own thread after all before them. Neither
// may throw.
//
// What a task leaves to be done after it may wait for later tasks, as callbacks of futures do: then
// another thread goes on with those.
class ProgressThreads {
 public:
  using After = std::function<void()>;  // may be empty
  using Task = std::function<After()>;

  ProgressThreads() = default;
  ProgressThreads(const ProgressThreads&) = delete;
  ProgressThreads& operator=(const ProgressThreads&) = delete;
  // Runs what is left in the queue first.
  ~ProgressThreads() { stop(); }

  void enqueue(Task task);
  // Runs `body` once everything enqueued so far has run, and lets what comes later wait meanwhile.
  template <typename Body>
  void run_here(Body&& body) {
    const Turn turn(*this);
    body();
  }
  // How many have been enqueued, or have begun to run here.
  std::uint64_t count();
  // Whether one of the first `count` of them runs, or is yet to; not what they left to be done.
  bool is_busy_with(std::uint64_t count);
  // Waits for what the tasks left to be done, too, unless it is called by that.
  void stop();
  // Whether one of the threads is still in what it had to do after a task, and has called stop().
  bool abandoned() const { return abandoned_; }
  // Nothing may be enqueued any more.
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
  std::atomic<bool> abandoned_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace paceline::backends
