#include "backends/paceline/p2p_progress_thread.h"

#include "base/start_thread.h"

namespace paceline::backends {

void P2PProgressThread::start() {
  std::lock_guard lock(mutex_);
  if (stopping_ || thread_.joinable()) return;
  thread_ = base::start_thread([this] { loop(); });
}

void P2PProgressThread::call() {
  // With the lock, or a call between the thread's look at the mailbox and its sleep would be lost.
  { std::lock_guard lock(mutex_); }
  called_.notify_one();
}

void P2PProgressThread::loop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      called_.wait(lock, [&] { return stopping_ || !mailbox_->idle(); });
      if (stopping_) return;
    }
    mailbox_->pump([&] { return stopping_ || mailbox_->idle(); });
  }
}

void P2PProgressThread::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  called_.notify_one();
  mailbox_->wake();
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    thread = std::move(thread_);
  }
  if (thread.get_id() == std::this_thread::get_id()) {
    detached_ = true;
    thread.detach();
  } else if (thread.joinable()) {
    thread.join();
  }
}

}  // namespace paceline::backends
