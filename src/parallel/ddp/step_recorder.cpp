#include "parallel/ddp/step_recorder.h"

#include <algorithm>

namespace paceline::ddp {
namespace {

void add(StepStats& total, const StepStats& step) {
  total.forward += step.forward;
  total.backward += step.backward;
  total.communication += step.communication;
  total.overlap += step.overlap;
  total.waiting += step.waiting;
  total.buckets += step.buckets;
  total.bytes += step.bytes;
  total.copied += step.copied;
}

}  // namespace

void StepRecorder::end_forward() {
  backward_begin_ = Clock::now();
  forward_ += backward_begin_ - forward_begin_;
}

void StepRecorder::begin_step() {
  if (backward_begin_ == Clock::time_point()) backward_begin_ = Clock::now();
  stats_.last = {};
  stats_.last.forward = forward_;
  forward_ = {};
}

void StepRecorder::add_bucket(std::size_t bytes) {
  if (stats_.last.buckets++ == 0) communication_begin_ = Clock::now();
  stats_.last.bytes += bytes;
}

void StepRecorder::end_step(const distributed::BucketChannel::Waits& waits) {
  const auto now = Clock::now();
  StepStats& step = stats_.last;
  step.backward = backward_end_ - backward_begin_;
  if (step.buckets > 0) {
    step.communication = now - communication_begin_;
    step.overlap = std::max(backward_end_ - communication_begin_, Clock::duration::zero());
  }
  step.waiting = waits.total;
  backward_begin_ = {};
  ++stats_.steps;
  add(stats_.total, step);
}

}  // namespace paceline::ddp
