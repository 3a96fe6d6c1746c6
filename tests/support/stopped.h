#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

namespace paceline::test {

// A process that stops itself until another one wakes it; in memory that both share.
class Stopped {
 public:
  void stop() {
    pid_ = ::getpid();
    if (!woken_) ::raise(SIGSTOP);
    awake_ = true;
  }
  // Whether it has stopped, is about to, or will: a signal that comes too early wakes nobody.
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
