#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include "base/deadline.h"
#include "base/pause.h"

namespace paceline::base {

// What a thread does while it waits for something of this process: calls of a library that only
// this thread may call, without which other threads would wait for ever.
//
// Sets that of the calling thread, which has none before. It must neither wait nor throw.
void set_idle_work(std::function<void()> work);
bool has_idle_work();
// Does the calling thread's, if it has any and is not in the middle of it. Hold no lock that the
// work may take.
void do_idle_work();

// As condition.wait_for(lock, deadline.remaining(), done), with idle work meanwhile.
template <typename Done>
bool wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                const Deadline& deadline, Done done) {
  if (!has_idle_work()) return condition.wait_for(lock, deadline.remaining(), done);
  for (const Pause pause; !done();) {
    if (deadline.expired()) return false;
    lock.unlock();
    do_idle_work();
    pause.rest();
    lock.lock();
  }
  return true;
}

// The same without a limit.
template <typename Done>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Done done) {
  wait_until(condition, lock, Deadline::after(Deadline::kLongest), done);
}

}  // namespace paceline::base
