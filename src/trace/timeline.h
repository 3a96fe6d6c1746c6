#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "trace/cpu_use.h"
#include "trace/node.h"
#include "trace/span.h"

namespace paceline::trace {

class TraceFile;

// Writes what this rank does to DIRECTORY/rankR.json, in the format of docs/timeline.md. Spans are
// kept in a buffer of fixed size. A thread formats and writes them: some thousands each second, so
// that it takes hardly any time from training, and the rest when the timeline is stopped. A span
// that finds the buffer full is dropped and counted.
//
// Any thread may record. A stopped timeline stays in memory and ignores calls, so a pointer to one
// never dangles. In a forked child there is none.
class Timeline {
 public:
  // nullptr unless one has been started.
  static Timeline* current() { return current_.load(std::memory_order_acquire); }

  // Call once the rank is known. Starts a timeline if PACELINE_TIMELINE names a directory, which is
  // created; one of the same rank in a job of the same size continues. Throws UsageError naming the
  // variable and the path.
  static void start(int rank, int size, const Node& node = {});
  // Regardless of the environment. Stops the timeline before; if that has the same rank, its file
  // is replaced.
  static void start(const std::filesystem::path& directory, int rank, int size,
                    const Node& node = {});
  // Writes all that is left and closes the file. `exit` does so too. Never throws.
  static void stop();

  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  // Tens of nanoseconds; never waits for the disk, never throws.
  void record(const Span& span) noexcept;
  // What the kernel knows of the calling thread, which trains, for 2 us. Never throws.
  using Moment = ThreadSampler::Moment;
  void sample_thread(Moment moment) noexcept;
  // Call for each bucket of a plan; replaces an earlier description of the bucket.
  void describe_bucket(std::uint64_t model, int bucket, std::uint64_t bytes,
                       std::string_view parameters);
  // The last call for a model counts, of each of these. `ranks`: that train the model together, in
  // ascending order.
  void describe_group(std::uint64_t model, std::span<const int> ranks);
  void describe_reductions(std::uint64_t model, const ReductionCost& cost);

 private:
  Timeline(const std::filesystem::path& path, int rank, int size, const Node& node);
  void add_fact(std::string_view event);
  void write();
  void close();

  static std::atomic<Timeline*> current_;

  const int rank_;
  const int size_;
  // The writer's, once it runs. Not on its stack, so that a forked child, which has no such thread,
  // does not leak them.
  std::unique_ptr<TraceFile> file_;
  CpuMeter cpu_;
  std::vector<Span> batch_;
  std::vector<ThreadUse> sample_batch_;
  std::string news_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Span> spans_;  // never grows
  std::size_t taken_ = 0;    // how many of them the writer has taken
  ThreadSampler thread_;
  std::vector<ThreadUse> samples_;  // never grows
  std::string facts_;               // formatted events
  std::uint64_t dropped_ = 0;
  bool open_ = true;
  std::thread writer_;
};

}  // namespace paceline::trace
