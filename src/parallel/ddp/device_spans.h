#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <memory>

#include "trace/span.h"

namespace paceline::ddp {

// The spans of steps on an accelerator, from events in its streams. Nothing waits for them: a span
// is complete once the accelerator has passed its end.
class DeviceSpans {
 public:
  struct Point {
    c10::Event event;
    trace::Clock::time_point recorded;  // when it was put into its stream
  };
  using PointPtr = std::shared_ptr<Point>;

  // `stream`: of an accelerator.
  static PointPtr mark(const c10::Stream& stream);
  // Null on the CPU.
  static PointPtr mark_current(const c10::Device& device);

  // The times of `span` are set when it is complete. Does nothing without both points.
  void add(const trace::Span& span, PointPtr begin, PointPtr end);
  // Passes the complete spans to `record`, in the order of `add`.
  void take(const std::function<void(const trace::Span&)>& record);

 private:
  struct Pending {
    trace::Span span;
    PointPtr begin;
    PointPtr end;
  };

  trace::Clock::time_point time_of(const PointPtr& point);

  std::deque<Pending> pending_{};
  // The point whose time was found last. Other times are measured from it, so that rounding and the
  // speed of the accelerator's clock matter for a step only.
  PointPtr reference_;
  trace::Clock::time_point reference_time_;
};

}  // namespace paceline::ddp
