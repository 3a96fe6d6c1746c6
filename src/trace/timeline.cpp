#include "trace/timeline.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>
#include <utility>

#include <paceline/error.h>

#include "base/environment.h"
#include "base/start_thread.h"
#include "trace/format.h"
#include "trace/trace_file.h"

namespace paceline::trace {
namespace {

// As many as fit into a file: 25 MB, which use memory only once touched.
constexpr std::size_t kCapacity = std::size_t{1} << 19;
constexpr std::size_t kMaxFacts = 1 << 20;
// Half a minute of samples: 3 MB.
constexpr std::size_t kMaxSamples = std::size_t{1} << 16;
constexpr std::chrono::seconds kInterval{1};
// What the writer does in an interval: 1.5 ms of work, as ranks that wait for each other all wait
// for one that has to share its core with its writer.
constexpr std::ptrdiff_t kShare = 5000;

// Never destroyed, as threads that outlive main may still record.
std::vector<std::unique_ptr<Timeline>>& all_timelines() {
  static auto* const all = new std::vector<std::unique_ptr<Timeline>>;
  return *all;
}

}  // namespace

std::atomic<Timeline*> Timeline::current_{nullptr};

void Timeline::start(int rank, int size, const Node& node) {
  const auto& directory = base::environment().timeline;
  const Timeline* const now = current();
  if (!directory || (now != nullptr && now->rank_ == rank && now->size_ == size)) return;
  start(*directory, rank, size, node);
}

void Timeline::start(const std::filesystem::path& directory, int rank, int size, const Node& node) {
  stop();
  try {
    std::filesystem::create_directories(directory);
    all_timelines().emplace_back(
        new Timeline(directory / fmt::format("rank{}.json", rank), rank, size, node));
  } catch (const std::filesystem::filesystem_error& error) {
    throw UsageError(fmt::format("PACELINE_TIMELINE={}: cannot create this directory: {}",
                                 directory.string(), error.code().message()));
  } catch (const Error& error) {
    throw UsageError(fmt::format("PACELINE_TIMELINE={}: {}", directory.string(), error.what()));
  }
  current_.store(all_timelines().back().get(), std::memory_order_release);
  static const int registered = [] {
    // The child has no writer, and the lock may be held by a thread that it does not have either.
    ::pthread_atfork(nullptr, nullptr, [] { current_.store(nullptr); });
    return std::atexit(&Timeline::stop);
  }();
  static_cast<void>(registered);
}

void Timeline::stop() {
  Timeline* const timeline = current_.exchange(nullptr);
  if (timeline != nullptr) timeline->close();
}

Timeline::Timeline(const std::filesystem::path& path, int rank, int size, const Node& node)
    : rank_(rank),
      size_(size),
      file_(std::make_unique<TraceFile>(path, rank)),
      facts_(job_event(rank, size, node)) {
  spans_.reserve(kCapacity);
  samples_.reserve(kMaxSamples);
  sample_batch_.reserve(kMaxSamples);
  // Where a file may not grow, this thread gets EFBIG, and no SIGXFSZ, which would end the process.
  writer_ = base::start_thread([this] { write(); });
}

Timeline::~Timeline() = default;

void Timeline::record(const Span& span) noexcept {
  if (current() != this) return;  // in a forked child the lock may be held forever
  const std::lock_guard lock(mutex_);
  if (!open_) return;
  if (spans_.size() == kCapacity) {
    ++dropped_;
  } else {
    spans_.push_back(span);
  }
}

void Timeline::sample_thread(Moment moment) noexcept {
  if (current() != this) return;
  const std::lock_guard lock(mutex_);
  if (!open_ || samples_.size() == kMaxSamples) return;
  if (const auto use = thread_.sample(moment)) samples_.push_back(*use);
}

void Timeline::describe_bucket(std::uint64_t model, int bucket, std::uint64_t bytes,
                               std::string_view parameters) {
  if (current() != this) return;
  add_fact(bucket_event(rank_, model, bucket, bytes, parameters));
}

void Timeline::describe_group(std::uint64_t model, std::span<const int> ranks) {
  if (current() == this) add_fact(group_event(rank_, model, ranks));
}

void Timeline::describe_reductions(std::uint64_t model, const ReductionCost& cost) {
  if (current() == this) add_fact(reduction_event(rank_, model, cost));
}

void Timeline::add_fact(std::string_view event) {
  const std::lock_guard lock(mutex_);
  if (!open_) return;
  if (facts_.size() + event.size() > kMaxFacts) {
    ++dropped_;
  } else {
    facts_ += event;
  }
}

// The writer's thread. It writes once before it waits, so that a file without steps names its rank.
void Timeline::write() {
  batch_.reserve(kShare);
  std::unique_lock lock(mutex_);
  while (true) {
    const bool closing = !open_;
    const auto begin = spans_.begin() + static_cast<std::ptrdiff_t>(taken_);
    const auto end = begin + std::min(spans_.end() - begin, kShare);
    batch_.assign(begin, end);
    taken_ += batch_.size();
    const bool all = end == spans_.end();
    if (all) {
      spans_.clear();
      taken_ = 0;
    }
    news_.swap(facts_);
    samples_.swap(sample_batch_);
    const std::uint64_t dropped = std::exchange(dropped_, 0);
    lock.unlock();
    if (dropped > 0) news_ += dropped_event(rank_, dropped);
    if (const auto use = cpu_.read()) news_ += cpu_event(rank_, *use);
    file_->write(news_);
    file_->write(sample_batch_);
    file_->write(batch_);
    news_.clear();
    sample_batch_.clear();
    if (closing && all) return file_->close();
    lock.lock();
    if (open_) wake_.wait_for(lock, kInterval, [&] { return !open_; });
  }
}

void Timeline::close() {
  {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  wake_.notify_one();
  writer_.join();
  thread_ = {};
  std::vector<Span>().swap(spans_);
  std::vector<ThreadUse>().swap(samples_);
  std::vector<ThreadUse>().swap(sample_batch_);
}

}  // namespace paceline::trace
