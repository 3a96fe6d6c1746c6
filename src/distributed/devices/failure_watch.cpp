#include "distributed/devices/failure_watch.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "base/log.h"
#include "base/start_thread.h"

namespace paceline::distributed {
namespace {

constexpr std::chrono::milliseconds kInterval{50};

}  // namespace

class FailureWatch::Thread {
 public:
  Thread(c10::intrusive_ptr<ExtendedBackend> host, std::string group, std::function<void()> abort);
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    stopped_.notify_one();
    thread_.join();
  }

 private:
  void run() noexcept {
    try {
      std::unique_lock lock(mutex_);
      while (!stopped_.wait_for(lock, kInterval, [this] { return stop_; })) {
        if (!host_->has_failed()) continue;
        lock.unlock();
        base::log(LogLevel::warning,
                  "group {} has lost a rank or failed: its calls on accelerators are aborted, and "
                  "what they should have written is undefined",
                  group_);
        return abort_();
      }
    } catch (const std::exception& error) {
      base::log(LogLevel::warning, "aborting the calls of group {} on accelerators: {}", group_,
                error.what());
    }
  }

  c10::intrusive_ptr<ExtendedBackend> host_;
  std::string group_;
  std::function<void()> abort_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

FailureWatch::Thread::Thread(c10::intrusive_ptr<ExtendedBackend> host, std::string group,
                             std::function<void()> abort)
    : host_(std::move(host)), group_(std::move(group)), abort_(std::move(abort)) {
  thread_ = base::start_thread([this] { run(); });
}

FailureWatch::FailureWatch(c10::intrusive_ptr<ExtendedBackend> host, std::string group,
                           std::function<void()> abort)
    : thread_(std::make_unique<Thread>(std::move(host), std::move(group), std::move(abort))) {}

FailureWatch::~FailureWatch() {
  // A forked child has no such thread, and its condition variable would wait for it.
  if (process_.is_forked_child()) std::ignore = thread_.release();
}

}  // namespace paceline::distributed
