#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

namespace paceline::test {

// Lets a process stop itself until another process wakes it. Place it in shared memory.
class Stopped {
 public:
  void stop() {
    pid_ = ::getpid();
    if (!woken_) ::raise(SIGSTOP);
    awake_ = true;
  }
  // Call before, while or after the process stops: a signal that comes too early is repeated.
  void wake() {
    woken_ = true;
    while (pid_ != 0 && !awake_) {
      ::kill(pid_, SIGCONT);
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<pid_t> pid_{0};
  std::atomic<bool> woken_{false};
  std::atomic<bool> awake_{false};
};

}  // namespace paceline::test
