#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "trace/cpu_use.h"
#include "trace/node.h"
#include "trace/span.h"

namespace paceline::trace {

class TraceFile;

// Writes what this rank does to DIRECTORY/rankR.json, in the format that docs/timeline.md tells.
// Spans wait in a buffer of fixed size for a thread that formats and writes them: each second some
// thousands, so that it hardly takes time from training, and what is left when the timeline is
// stopped. A span that finds the buffer full is left out and counted.
//
// Any thread may record. A stopped timeline stays in memory and ignores what it is told, so a
// pointer to one never dangles. In a forked child there is none.
class Timeline {
 public:
  // nullptr unless one has been started.
  static Timeline* current() { return current_.load(std::memory_order_acquire); }

  // Once the rank is known: starts one if PACELINE_TIMELINE names a directory, which is created.
  // If there is one of this rank in a job of this size, that goes on. Throws UsageError naming the
  // variable and the path if it cannot be.
  static void start(int rank, int size, const Node& node = {});
  // Whatever the environment says, and in place of the one before, which is stopped; of the same
  // rank, its file is replaced.
  static void start(const std::filesystem::path& directory, int rank, int size,
                    const Node& node = {});
  // Writes what there is and closes the file. Also done by `exit`. Never throws.
  static void stop();

  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  // Tens of nanoseconds; never waits for the disk, never throws.
  void record(const Span& span) noexcept;
  // Once for each bucket of a plan; what was said of that bucket before counts no longer.
  void describe_bucket(std::uint64_t model, int bucket, std::uint64_t bytes,
                       std::string_view parameters);

 private:
  Timeline(const std::filesystem::path& path, int rank, int size, const Node& node);
  void write();
  void close();

  static std::atomic<Timeline*> current_;

  const int rank_;
  const int size_;
  // The writer's, once it runs. Not on its stack: a forked child has no such thread, and would have
  // lost them.
  std::unique_ptr<TraceFile> file_;
  const CpuMeter cpu_;
  std::vector<Span> batch_;
  std::string news_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Span> spans_;  // never grows
  std::size_t taken_ = 0;    // of them, by the writer
  std::string facts_;        // events that are formatted already
  std::uint64_t lost_ = 0;
  bool open_ = true;
  std::thread writer_;
};

}  // namespace paceline::trace
