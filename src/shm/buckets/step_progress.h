#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "shm/region.h"

namespace paceline::shm {

// Advances a step on a thread of its own while the rank's thread computes gradients. Between nodes
// a bucket takes several turns, and the hooks of a backward are too far apart for them.
//
// In a forked child, which lacks the thread, call nothing and leak it.
class StepProgress {
 public:
  // `advance` is called on the thread whenever this rank's doorbell rings, and again at once if it
  // returns true. It must not wait.
  StepProgress(std::shared_ptr<Region> region, std::function<bool()> advance);
  StepProgress(const StepProgress&) = delete;
  StepProgress& operator=(const StepProgress&) = delete;
  ~StepProgress();

  // From here on `advance` is called, until end(), or until it throws or the region fails.
  void begin();
  // Returns once `advance` is not running. Does nothing if the step has ended.
  void end() noexcept;
  // Throws what `advance` has thrown since begin().
  void rethrow();

 private:
  void run();

  const std::shared_ptr<Region> region_;
  const std::function<bool()> advance_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool active_ = false;
  bool advances_ = false;  // `advance` runs
  bool stops_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace paceline::shm
