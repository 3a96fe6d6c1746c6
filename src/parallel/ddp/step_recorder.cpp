#include "parallel/ddp/step_recorder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

namespace paceline::ddp {
namespace {

using trace::Kind;
using trace::LiveView;
using trace::Timeline;
using Moment = trace::ThreadSampler::Moment;

std::atomic<std::uint64_t> next_number = 0;

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

std::uint64_t next_model_number() {
  return next_number++;
}

StepRecorder::StepRecorder(const c10::Device& device, std::uint64_t model)
    : device_(device), model_(model), samples_(std::numeric_limits<double>::quiet_NaN()) {
  std::uint64_t next = next_number;
  while (next <= model && !next_number.compare_exchange_weak(next, model + 1)) {
  }
}

void StepRecorder::sample_thread(Moment moment) const {
  if (Timeline* const timeline = Timeline::current()) timeline->sample_thread(moment);
  if (live_ != nullptr) live_->sample_thread(moment);
}

void StepRecorder::record_span(Kind kind, Clock::time_point begin, Clock::time_point end,
                               int bucket, int peer) const {
  const trace::Span span{kind, model_, step_, bucket, peer, begin, end};
  if (Timeline* const timeline = Timeline::current()) timeline->record(span);
  if (live_ != nullptr) live_->record(span, samples_);
}

DeviceSpans::PointPtr StepRecorder::mark_device() const {
  return Timeline::current() == nullptr ? nullptr : DeviceSpans::mark_current(device_);
}

void StepRecorder::add_device_span(Kind kind, DeviceSpans::PointPtr begin,
                                   DeviceSpans::PointPtr end, int bucket) {
  device_spans_.add({kind, model_, step_, bucket}, std::move(begin), std::move(end));
}

// Of earlier steps, mostly.
void StepRecorder::record_device_spans() {
  device_spans_.take([](const trace::Span& span) {
    if (Timeline* const timeline = Timeline::current()) timeline->record(span);
  });
}

void StepRecorder::describe_bucket(std::size_t bucket, std::size_t bytes,
                                   const std::string& parameters) const {
  if (Timeline* const timeline = Timeline::current()) {
    timeline->describe_bucket(model_, static_cast<int>(bucket), bytes, parameters);
  }
  if (LiveView* const live = LiveView::current()) {
    live->describe_bucket(model_, static_cast<int>(bucket), bytes, parameters);
  }
}

void StepRecorder::begin_forward(std::uint64_t step) {
  step_ = step;
  if (step_begin_ == kNever) {
    live_ = LiveView::watched();
    sample_thread(Moment::begin);
  }
  forward_begin_ = Clock::now();
  device_forward_begin_ = mark_device();
  if (step_begin_ == kNever) step_begin_ = forward_begin_;
}

void StepRecorder::end_pre_forward_sync() {
  const auto now = Clock::now();
  pre_forward_sync_ += now - forward_begin_;
  record_span(Kind::pre_forward_sync, forward_begin_, now);
  forward_begin_ = now;
  device_forward_begin_ = mark_device();
}

void StepRecorder::end_forward() {
  backward_begin_ = Clock::now();
  forward_ += backward_begin_ - forward_begin_;
  record_span(Kind::forward, forward_begin_, backward_begin_);
  device_backward_begin_ = mark_device();
  add_device_span(Kind::device_forward, std::move(device_forward_begin_), device_backward_begin_);
  record_device_spans();
}

void StepRecorder::end_backward() {
  backward_end_ = Clock::now();
  add_device_span(Kind::device_backward, std::move(device_backward_begin_), mark_device());
}

void StepRecorder::end_leaf() {
  if (backward_begin_ == kNever) return;
  backward_ += backward_end_ - backward_begin_;
  record_span(Kind::backward, backward_begin_, backward_end_);
  backward_begin_ = kNever;
}

void StepRecorder::begin_step(std::uint64_t step, std::size_t buckets) {
  step_ = step;
  if (backward_begin_ == kNever) backward_begin_ = Clock::now();
  if (step_begin_ == kNever) {
    live_ = LiveView::watched();
    step_begin_ = backward_begin_;
  }
  stats_.last = {};
  stats_.last.forward = forward_;
  stats_.last.backward = backward_;
  stats_.last.waiting = pre_forward_sync_;
  forward_ = backward_ = pre_forward_sync_ = {};
  published_.assign(is_recording() ? buckets : 0, kNever);
  device_published_.assign(published_.size(), nullptr);
}

void StepRecorder::count_samples(double count) {
  samples_ = (std::isnan(samples_) ? 0 : samples_) + count;
}

void StepRecorder::add_bucket(std::size_t bucket, std::size_t bytes) {
  if (stats_.last.buckets++ == 0) communication_begin_ = Clock::now();
  stats_.last.bytes += bytes;
  if (bucket >= published_.size()) return;
  published_[bucket] = Clock::now();
  device_published_[bucket] = mark_device();
}

void StepRecorder::end_device_bucket(std::size_t bucket, const c10::Stream& stream) {
  if (bucket >= device_published_.size() || device_published_[bucket] == nullptr) return;
  add_device_span(Kind::device_bucket, std::move(device_published_[bucket]),
                  DeviceSpans::mark(stream), static_cast<int>(bucket));
}

void StepRecorder::record_reduced_buckets(const distributed::BucketReducer& bucket_reducer) {
  for (std::size_t bucket = 0; bucket < published_.size(); ++bucket) {
    if (published_[bucket] == kNever || !bucket_reducer.is_reduced(bucket)) continue;
    record_span(Kind::bucket, published_[bucket], Clock::now(), static_cast<int>(bucket));
    published_[bucket] = kNever;
  }
}

void StepRecorder::end_step(const distributed::BucketReducer& bucket_reducer) {
  const auto now = Clock::now();
  StepStats& step = stats_.last;
  step.backward += backward_end_ - backward_begin_;
  if (step.buckets > 0) {
    step.communication = now - communication_begin_;
    step.overlap = std::max(backward_end_ - communication_begin_, Clock::duration::zero());
  }
  for (const auto& wait : bucket_reducer.waits()) {
    step.waiting += wait.end - wait.begin;
    record_span(Kind::wait, wait.begin, wait.end, wait.bucket, wait.rank);
  }
  record_reduced_buckets(bucket_reducer);
  record_span(Kind::backward, backward_begin_, now);
  record_span(Kind::step, step_begin_, now);
  record_device_spans();
  sample_thread(Moment::end);
  step_begin_ = backward_begin_ = kNever;
  ++stats_.steps;
  add(stats_.total, step);
}

}  // namespace paceline::ddp
