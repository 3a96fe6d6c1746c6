#pragma once

#include <paceline/ddp_stats.h>

#include <vector>

#include "distributed/bucket_reducer.h"
#include "parallel/ddp/device_spans.h"
#include "trace/live_view.h"
#include "trace/timeline.h"

namespace paceline::ddp {

// A number that no other model of this process has.
std::uint64_t next_model_number();

// Records synchronised steps for stats(), for the timeline if there is one, and for `paceline top`
// while it watches.
class StepRecorder {
 public:
  // `device`: the model's. `model`: its number in timelines.
  StepRecorder(const c10::Device& device, std::uint64_t model);

  // `step`: the bucket reducer's number, which is the same on all ranks.
  void begin_forward(std::uint64_t step);
  // Attributes the time since begin_forward to pre-forward communication.
  void end_pre_forward_sync();
  void end_forward();
  void begin_step(std::uint64_t step, std::size_t buckets);
  // Counts what the step trains, if the program says how many samples that are.
  void count_samples(double count);
  // Drops an aborted step from the statistics.
  void abort_step() {
    step_begin_ = backward_begin_ = kNever;
    published_.clear();
    device_published_.clear();
  }
  void add_bucket(std::size_t bucket, std::size_t bytes);
  void add_copy(std::size_t bytes) { stats_.last.copied += bytes; }
  // Ends the spans of the buckets that are reduced by now.
  void record_reduced_buckets(const distributed::BucketReducer& bucket_reducer);
  // The bucket's average is the last thing in this stream of the accelerator.
  void end_device_bucket(std::size_t bucket, const c10::Stream& stream);
  void end_backward();
  // Call instead of end_step after a backward whose gradients other backwards of the step add to.
  void end_leaf();
  void end_step(const distributed::BucketReducer& bucket_reducer);

  // Call for each bucket of a new plan.
  void describe_bucket(std::size_t bucket, std::size_t bytes, const std::string& parameters) const;
  void describe_reductions(const trace::ReductionCost& cost) const {
    auto* const timeline = trace::Timeline::current();
    if (timeline != nullptr) timeline->describe_reductions(model_, cost);
  }
  const DdpStats& stats() const { return stats_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::time_point kNever{};

  bool is_recording() const { return trace::Timeline::current() != nullptr || live_ != nullptr; }
  // Samples what the kernel knows of this thread.
  void sample_thread(trace::ThreadSampler::Moment moment) const;
  void record_span(trace::Kind kind, Clock::time_point begin, Clock::time_point end,
                   int bucket = -1, int peer = -1) const;
  // A point in the accelerator's current stream; null if there is none, or no timeline.
  DeviceSpans::PointPtr mark_device() const;
  void add_device_span(trace::Kind kind, DeviceSpans::PointPtr begin, DeviceSpans::PointPtr end,
                       int bucket = -1);
  void record_device_spans();

  c10::Device device_;
  std::uint64_t model_;
  trace::LiveView* live_ = nullptr;  // if somebody watched at the begin of the step
  double samples_;                   // of all steps; NaN if they are not known
  DdpStats stats_;
  std::uint64_t step_ = 0;
  StepStats::Duration forward_{};  // of the step that has yet to begin, as is the next
  StepStats::Duration backward_{};
  StepStats::Duration pre_forward_sync_{};
  Clock::time_point step_begin_ = kNever;
  Clock::time_point forward_begin_;
  Clock::time_point backward_begin_ = kNever;  // no forward has ended since the last step
  Clock::time_point communication_begin_;
  Clock::time_point backward_end_;
  std::vector<Clock::time_point> published_;  // by bucket under way, if spans are recorded
  // Likewise on the accelerator.
  DeviceSpans device_spans_;
  DeviceSpans::PointPtr device_forward_begin_;
  DeviceSpans::PointPtr device_backward_begin_;
  std::vector<DeviceSpans::PointPtr> device_published_;
};

}  // namespace paceline::ddp
