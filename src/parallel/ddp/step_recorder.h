#pragma once

#include <paceline/ddp_stats.h>

#include "distributed/bucket_channel.h"

namespace paceline::ddp {

// Takes down what happens in synchronised steps.
class StepRecorder {
 public:
  void begin_forward() { forward_begin_ = Clock::now(); }
  void end_forward();
  void begin_step();
  void add_bucket(std::size_t bytes);
  void add_copy(std::size_t bytes) { stats_.last.copied += bytes; }
  void end_backward() { backward_end_ = Clock::now(); }
  void end_step(const distributed::BucketChannel::Waits& waits);

  const DdpStats& stats() const { return stats_; }

 private:
  using Clock = std::chrono::steady_clock;

  DdpStats stats_;
  StepStats::Duration forward_{};  // of the step that has yet to begin
  Clock::time_point forward_begin_;
  Clock::time_point backward_begin_;  // zero: no forward has ended since the last step
  Clock::time_point communication_begin_;
  Clock::time_point backward_end_;
};

}  // namespace paceline::ddp
