#include "parallel/ddp/device_spans.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "distributed/devices/streams.h"

namespace paceline::ddp {
namespace {

using trace::Clock;

// More are dropped: the accelerator is that far behind, or no step ends.
constexpr std::size_t kMaxPending = 100'000;

}  // namespace

DeviceSpans::PointPtr DeviceSpans::mark(const c10::Stream& stream) {
  auto point = std::make_shared<Point>(
      Point{c10::Event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT), Clock::now()});
  point->event.record(stream);
  return point;
}

DeviceSpans::PointPtr DeviceSpans::mark_current(const c10::Device& device) {
  if (device.is_cpu()) return nullptr;
  return mark(distributed::current_stream(device));
}

void DeviceSpans::add(const trace::Span& span, PointPtr begin, PointPtr end) {
  if (begin == nullptr || end == nullptr || pending_.size() == kMaxPending) return;
  pending_.push_back({span, std::move(begin), std::move(end)});
}

void DeviceSpans::take(const std::function<void(const trace::Span&)>& record) {
  while (!pending_.empty() && pending_.front().end->event.query()) {
    auto& [span, begin, end] = pending_.front();
    span.begin = time_of(begin);
    span.end = time_of(end);
    record(span);
    pending_.pop_front();
  }
}

// Two clocks: the accelerator passes a point after it was put into the stream, and before that is
// seen here. Points that it passes at once keep the error at microseconds.
Clock::time_point DeviceSpans::time_of(const PointPtr& point) {
  const Clock::time_point now = Clock::now();
  if (reference_ != nullptr) {
    const std::chrono::duration<double, std::milli> since(
        reference_->event.elapsedTime(point->event));
    reference_time_ += std::chrono::duration_cast<Clock::duration>(since);
  }
  reference_time_ = std::clamp(reference_time_, point->recorded, now);
  reference_ = point;
  return reference_time_;
}

}  // namespace paceline::ddp
