#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "shm/p2p/mailbox.h"

namespace paceline::backends {

// Drives the messages of a mailbox whose callers do not wait for them. Its thread starts with the
// first message.
class P2PProgressThread {
 public:
  explicit P2PProgressThread(std::shared_ptr<shm::Mailbox> mailbox)
      : mailbox_(std::move(mailbox)) {}
  P2PProgressThread(const P2PProgressThread&) = delete;
  P2PProgressThread& operator=(const P2PProgressThread&) = delete;
  ~P2PProgressThread() { stop(); }

  // Call before the first call(). Throws Error if no thread can be started.
  void start();
  // There is a new request.
  void call();
  void stop();
  // Whether the thread itself called stop(), and so was detached: it still runs, and uses this.
  bool detached() const { return detached_; }

 private:
  void loop();

  std::shared_ptr<shm::Mailbox> mailbox_;
  std::mutex mutex_;
  std::condition_variable called_;
  std::atomic<bool> stopping_ = false;  // set under the mutex
  std::atomic<bool> detached_ = false;
  std::thread thread_;
};

}  // namespace paceline::backends
