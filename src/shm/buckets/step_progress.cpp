#include "shm/buckets/step_progress.h"

#include <sched.h>

#include <utility>

#include "base/start_thread.h"

namespace paceline::shm {

StepProgress::StepProgress(std::shared_ptr<Region> region, std::function<bool()> advance)
    : region_(std::move(region)), advance_(std::move(advance)) {
  thread_ = base::start_thread([this] { run(); });
}

StepProgress::~StepProgress() {
  {
    const std::lock_guard lock(mutex_);
    active_ = false;
    stops_ = true;
  }
  changed_.notify_all();
  region_->ring(region_->rank());
  thread_.join();
}

void StepProgress::begin() {
  {
    const std::lock_guard lock(mutex_);
    active_ = true;
    error_ = nullptr;
  }
  changed_.notify_all();
}

void StepProgress::end() noexcept {
  std::unique_lock lock(mutex_);
  active_ = false;
  changed_.wait(lock, [&] { return !advances_; });
}

void StepProgress::rethrow() {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void StepProgress::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return active_ || stops_; });
    if (stops_) return;
    advances_ = true;
    lock.unlock();
    const std::uint32_t heard = region_->rings();
    bool again = false;
    std::exception_ptr error;
    try {
      again = advance_();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    advances_ = false;
    error_ = error;
    // The rank's thread throws a failure of the region in its own call.
    if (error || region_->failed()) active_ = false;
    changed_.notify_all();
    lock.unlock();
    again ? static_cast<void>(::sched_yield()) : region_->listen(heard);
    lock.lock();
  }
}

}  // namespace paceline::shm
