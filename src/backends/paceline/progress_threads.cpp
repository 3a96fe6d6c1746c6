#include "backends/paceline/progress_threads.h"

#include <utility>

#include <paceline/error.h>

#include "base/idle_work.h"
#include "base/start_thread.h"

namespace paceline::backends {

ProgressThreads::Turn::Turn(ProgressThreads& threads) : threads_(threads) {
  std::unique_lock lock(threads_.mutex_);
  base::wait(threads_.idle_, lock, [&] { return threads_.tasks_.empty() && !threads_.running_; });
  threads_.running_ = true;
  threads_.running_number_ = ++threads_.count_;
}

ProgressThreads::Turn::~Turn() {
  {
    std::lock_guard lock(threads_.mutex_);
    threads_.running_ = false;
  }
  threads_.arrived_.notify_one();
  threads_.idle_.notify_all();
}

void ProgressThreads::enqueue(Task task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(task), ++count_});
    try {
      provide_thread();
    } catch (...) {
      tasks_.pop_back();
      throw;
    }
  }
  arrived_.notify_one();
}

std::uint64_t ProgressThreads::count() {
  const std::lock_guard lock(mutex_);
  return count_;
}

bool ProgressThreads::is_busy_with(std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  return (running_ && running_number_ <= count) ||
         (!tasks_.empty() && tasks_.front().number <= count);
}

bool ProgressThreads::is_idle() {
  const std::lock_guard lock(mutex_);
  return !running_ && tasks_.empty() && free_ == threads_.size();
}

// With the mutex held. Throws Error if the system has no thread to give.
void ProgressThreads::provide_thread() {
  if (tasks_.empty() || free_ > 0) return;
  threads_.push_back(base::start_thread([this] { loop(); }));
  ++free_;
  ++loops_;
}

void ProgressThreads::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    arrived_.wait(lock, [&] { return !running_ && (stopping_ || !tasks_.empty()); });
    if (tasks_.empty()) break;
    Task task = std::move(tasks_.front().task);
    running_number_ = tasks_.front().number;
    tasks_.pop_front();
    running_ = true;
    lock.unlock();
    After after = task();
    task = nullptr;
    lock.lock();
    running_ = false;
    if (tasks_.empty()) idle_.notify_all();
    if (!after) continue;

    --free_;
    try {
      provide_thread();
    } catch (const Error&) {
      // This thread continues with the tasks afterwards.
    }
    lock.unlock();
    arrived_.notify_one();
    after();
    after = nullptr;
    lock.lock();
    ++free_;
  }
  --free_;
  --loops_;
  arrived_.notify_all();  // another thread may wait for this one's task
  idle_.notify_all();
}

void ProgressThreads::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  arrived_.notify_all();
  if (base::has_idle_work()) {  // which these threads may need to end
    base::wait(idle_, lock, [&] { return loops_ == 0; });
  }
  while (!threads_.empty()) {
    std::thread last = std::move(threads_.back());
    threads_.pop_back();
    if (last.get_id() == std::this_thread::get_id()) {
      detached_ = true;
      last.detach();
      continue;
    }
    lock.unlock();
    last.join();
    lock.lock();
  }
  // If this is the only thread that the system had to give, it would run them too late.
  while (!tasks_.empty()) {
    const Task task = std::move(tasks_.front().task);
    tasks_.pop_front();
    lock.unlock();
    if (const After after = task()) after();
    lock.lock();
  }
}

}  // namespace paceline::backends
