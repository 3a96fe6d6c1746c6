#pragma once

#include <chrono>
#include <cstdint>

namespace paceline::trace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: one for all processes of a machine

// step: from the begin of a training forward to the end of its synchronised backward.
// pre_forward_sync: in collective calls before the forward, for buffers say. wait: blocked on
// peers. bucket: from publishing a bucket until all ranks have reduced it. device_: what an
// accelerator did, whose work the other kinds only submit; device_bucket: from the time when the
// accelerator has a bucket's gradients until it has their average.
enum class Kind : std::uint8_t {
  step,
  pre_forward_sync,
  forward,
  backward,
  wait,
  bucket,
  device_forward,
  device_backward,
  device_bucket
};

constexpr bool is_on_device(Kind kind) {
  return kind >= Kind::device_forward;
}
constexpr bool is_of_bucket(Kind kind) {
  return kind == Kind::bucket || kind == Kind::device_bucket;
}

// What the reduction of a bucket costs while nothing else runs: `latency` microseconds, and one for
// each `rate` bytes. A rate of 0 is unknown.
struct ReductionCost {
  double latency = 0;
  double rate = 0;
};

struct Span {
  Kind kind;
  std::uint64_t model;  // several may be trained in one process
  std::uint64_t step;   // the model's; equal numbers belong together across ranks
  int bucket = -1;      // of a bucket's kinds, and of a wait: for which one; -1 is none
  int peer = -1;        // of a wait: the rank that was waited for longest; -1 is none
  Clock::time_point begin{};
  Clock::time_point end{};
};

}  // namespace paceline::trace
