#include "parallel/data_parallel/replica_threads.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "base/cores.h"
#include "base/start_thread.h"
#include "shm/sync/wait_ladder.h"

namespace paceline::data_parallel {

class ReplicaThreads::Impl {
 public:
  explicit Impl(std::size_t count);
  void run(std::size_t count, const Task& task);

 private:
  void work(const std::stop_token& stop, std::size_t number);

  // A step makes two calls, which follow each other within microseconds: to sleep in between would
  // cost more than the gap.
  const shm::WaitLadder ladder_;
  std::mutex mutex_;
  std::condition_variable_any start_;
  std::condition_variable done_;
  const Task* task_ = nullptr;
  std::size_t count_ = 0;
  std::atomic<std::size_t> running_ = 0;  // on threads of its own; written under the lock
  std::atomic<std::uint64_t> round_ = 0;  // likewise

  std::vector<std::jthread> threads_;  // last: they use everything above
};

ReplicaThreads::Impl::Impl(std::size_t count)
    : ladder_(count > static_cast<std::size_t>(base::available_cores())) {
  for (std::size_t number = 1; number < count; ++number) {
    threads_.push_back(base::start_thread<std::jthread>(
        [this, number](const std::stop_token& stop) { work(stop, number); }));
  }
}

void ReplicaThreads::Impl::run(std::size_t count, const Task& task) {
  std::unique_lock lock(mutex_);
  task_ = &task;
  count_ = count;
  running_ = count - 1;
  ++round_;
  lock.unlock();
  if (count > 1) start_.notify_all();
  task(0);
  const auto is_done = [&] { return running_ == 0; };
  if (ladder_.spin_or_yield(is_done)) return;
  lock.lock();
  done_.wait(lock, is_done);
}

void ReplicaThreads::Impl::work(const std::stop_token& stop, std::size_t number) {
  std::uint64_t last = 0;
  const auto has_work = [&] { return round_ != last; };
  while (true) {
    ladder_.spin_or_yield([&] { return has_work() || stop.stop_requested(); });
    std::unique_lock lock(mutex_);
    if (!start_.wait(lock, stop, has_work)) return;
    last = round_;
    if (number >= count_) continue;
    lock.unlock();
    (*task_)(number);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

ReplicaThreads::ReplicaThreads(std::size_t count)
    : impl_(std::make_unique<Impl>(count)), owner_(::getpid()) {}

ReplicaThreads::~ReplicaThreads() {
  if (::getpid() != owner_) static_cast<void>(impl_.release());
}

void ReplicaThreads::run(std::size_t count, const Task& task) {
  if (::getpid() != owner_) {
    throw UsageError(
        "DataParallel: it belongs to the parent process and cannot run in a forked child, which "
        "does not have its threads; construct another one there");
  }
  impl_->run(count, task);
}

}  // namespace paceline::data_parallel
