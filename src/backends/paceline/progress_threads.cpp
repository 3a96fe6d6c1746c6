#include "backends/paceline/progress_threads.h"

#include <utility>

namespace paceline::backends {

void ProgressThreads::enqueue(Task task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    provide_thread();
  }
  arrived_.notify_one();
}

// With the mutex held.
void ProgressThreads::provide_thread() {
  if (tasks_.empty() || free_ > 0) return;
  ++free_;
  threads_.emplace_back([this] { loop(); });
}

void ProgressThreads::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    arrived_.wait(lock, [&] { return !running_ && (stopping_ || !tasks_.empty()); });
    if (tasks_.empty()) break;
    Task task = std::exchange(tasks_.front(), nullptr);
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
    provide_thread();
    lock.unlock();
    arrived_.notify_one();
    after();
    after = nullptr;
    lock.lock();
    ++free_;
  }
  --free_;
  arrived_.notify_all();  // another may wait for this one's task to end
}

void ProgressThreads::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  arrived_.notify_all();
  while (!threads_.empty()) {
    std::thread last = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    last.join();
    lock.lock();
  }
}

}  // namespace paceline::backends
