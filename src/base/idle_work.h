#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include "base/deadline.h"
#include "base/pause.h"

namespace paceline::base {

// What a thread does while it waits: the calls of a library that no other thread may call.
//
// Sets that of the calling thread, which has none before. It must neither wait nor throw, and live
// as long as the thread does anything: destructors of static objects may wait, too.
void set_idle_work(const std::function<void()>* work);
bool has_idle_work();
// Runs that of the calling thread, unless there is none or it is running. Hold no lock that it may
// take.
void do_idle_work();

// As condition.wait_for(lock, deadline.remaining(), done), with idle work meanwhile.
template <typename Done>
bool wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
                const Deadline& deadline, Done done) {
  if (!has_idle_work()) return condition.wait_for(lock, deadline.remaining(), done);
  for (const Pause pause; !done();) {
    lock.unlock();
    do_idle_work();
    pause.rest();
    lock.lock();
    if (deadline.expired()) return done();
  }
  return true;
}

// The same without a limit.
template <typename Done>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Done done) {
  if (!has_idle_work()) return condition.wait(lock, done);
  wait_until(condition, lock, Deadline::after(Deadline::kLongest), done);
}

}  // namespace paceline::base
