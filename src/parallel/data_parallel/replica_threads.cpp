#include "parallel/data_parallel/replica_threads.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "base/signals_blocked.h"

namespace paceline::data_parallel {

class ReplicaThreads::Impl {
 public:
  explicit Impl(std::size_t count);
  void run(std::size_t count, const Task& task);

 private:
  void work(const std::stop_token& stop, std::size_t number);

  std::mutex mutex_;
  std::condition_variable_any start_;
  std::condition_variable done_;
  const Task* task_ = nullptr;
  std::size_t count_ = 0;
  std::size_t running_ = 0;  // on threads of its own
  std::uint64_t round_ = 0;

  std::vector<std::jthread> threads_;  // last: they use everything above
};

ReplicaThreads::Impl::Impl(std::size_t count) {
  const base::SignalsBlocked blocked;
  for (std::size_t number = 1; number < count; ++number) {
    threads_.emplace_back([this, number](const std::stop_token& stop) { work(stop, number); });
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
  lock.lock();
  done_.wait(lock, [&] { return running_ == 0; });
}

void ReplicaThreads::Impl::work(const std::stop_token& stop, std::size_t number) {
  std::unique_lock lock(mutex_);
  std::uint64_t last = 0;
  while (start_.wait(lock, stop, [&] { return round_ != last; })) {
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
