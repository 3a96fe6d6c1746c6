#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include "base/unique_fd.h"
#include "trace/cpu_use.h"
#include "trace/live_memory.h"
#include "trace/node.h"
#include "trace/span.h"

namespace paceline::trace {

// What this process shows to `paceline top`, in memory that the command maps. While nobody watches,
// it costs one load of a word a step, and nothing is recorded.
//
// Any thread may record. It stays in memory until the process ends. In a forked child there is
// none.
class LiveView {
 public:
  // nullptr unless one has been started.
  static LiveView* current() { return current_.load(std::memory_order_acquire); }
  // The same, and nullptr unless somebody watches now. Call at the begin of each step.
  static LiveView* watched() noexcept;
  // Call when a model is wrapped. The first call makes the memory; the last one says which rank
  // this is. `identity`: of the world; 0 if not known, which keeps the one before. Never throws: if
  // the system refuses the memory, that is logged.
  static void start(int rank, int size, const Node& node, std::uint64_t identity = 0) noexcept;

  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;
  ~LiveView();

  // `samples`: that the model's steps have trained so far; NaN if it is not known.
  void record(const Span& span, double samples) noexcept;
  // As Timeline::sample_thread.
  void sample_thread(ThreadSampler::Moment moment) noexcept;
  void describe_bucket(std::uint64_t model, int bucket, std::uint64_t bytes,
                       std::string_view parameters) noexcept;
  // `ranks`: that train the model together, in ascending order. Never throws: without the memory
  // for it, or for a text that is too long, a viewer does not know them.
  void describe_group(std::uint64_t model, std::span<const int> ranks) noexcept;
  // Counts samples that the program reports by itself. Once it does, these are shown.
  void count_samples(double count) noexcept;

 private:
  LiveView();
  void set_place(int rank, int size, const Node& node, std::uint64_t identity) noexcept;

  static std::atomic<LiveView*> current_;

  base::UniqueFd fd_;  // open, so that /proc shows it
  LiveMemory* memory_ = nullptr;
  std::mutex mutex_;
  std::optional<RingWriter<SpanRing>> spans_;
  std::optional<RingWriter<BucketRing>> buckets_;
  ThreadSampler thread_;
  std::atomic<double> samples_;
};

}  // namespace paceline::trace
