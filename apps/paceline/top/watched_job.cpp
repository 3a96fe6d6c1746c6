#include "top/watched_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/cores.h"

namespace paceline::top {
namespace {

using namespace std::chrono_literals;

// A viewer that is slow, or stopped for a moment, misses nothing; after its end ranks go on for as
// long.
constexpr auto kLease = 3s;
constexpr auto kBetweenSearches = 1s;
constexpr auto kBetweenMeasures = 500ms;
constexpr auto kWindow = 10s;
constexpr std::size_t kFewestSteps = 20;
constexpr std::size_t kMostSteps = 1000;

}  // namespace

WatchedJob::WatchedJob(JobKey key) : key_(std::move(key)), last_step_end_(Clock::now()) {
  find_ranks();
}

void WatchedJob::find_ranks() {
  if (!ranks_.empty()) key_ = key_of(ranks_.begin()->second.process);
  next_search_ = Clock::now() + kBetweenSearches;
  for (LiveProcess& process : ranks_of(key_)) {
    const int rank = process.place.rank;
    const auto known = ranks_.find(rank);
    if (known != ranks_.end()) continue;
    process.reader->watch_until(Clock::now() + kLease);
    const trace::CpuMeter cpu(process.pid);
    ranks_.emplace(rank, Rank{std::move(process), {}, cpu});
  }
}

void WatchedJob::poll() {
  const auto now = Clock::now();
  std::erase_if(ranks_, [](const auto& entry) {
    return entry.second.process.has_ended() || !entry.second.process.has_place();
  });
  const int expected = ranks_.empty() ? 1 : ranks_.begin()->second.process.place.node.ranks;
  const bool all = std::ssize(ranks_) >= (expected > 0 ? expected : key_.size);
  if (!all && (ranks_.empty() || now >= next_search_)) find_ranks();
  const bool measures = now >= next_cpu_;
  if (measures) next_cpu_ = now + kBetweenMeasures;
  for (auto& [number, rank] : ranks_) {
    rank.process.reader->watch_until(now + kLease);
    rank.window.add(rank.process.reader->read(), measures ? rank.cpu.read() : std::nullopt);
    if (const auto* const step = rank.window.last_step()) {
      last_step_end_ = std::max(last_step_end_, step->end);
    }
  }
  // Each rank by itself: one that trains another model may have steps of another length.
  for (auto& [number, rank] : ranks_) {
    rank.window.keep_since(last_step_end_ - kWindow, kFewestSteps, kMostSteps);
  }
}

report::RankTrace WatchedJob::trace_of(const Rank& rank) const {
  report::RankTrace trace = rank.window.trace();
  const LiveProcess& process = rank.process;
  const auto cores = base::affinity(process.pid);
  trace.path = fmt::format("process {}", process.pid);
  trace.rank = process.place.rank;
  trace.size = key_.size;
  trace.local_size = process.place.node.ranks;
  trace.cores = base::available_cores(process.pid);
  trace.affinity = {cores.begin(), cores.end()};
  return trace;
}

std::vector<std::string> WatchedJob::notes() const {
  std::vector<std::string> notes;
  const auto missing = key_.size - std::ssize(ranks_);
  if (missing > 0) {
    const int local = ranks_.empty() ? 0 : ranks_.begin()->second.process.place.node.ranks;
    const bool elsewhere = local > 0 && std::ssize(ranks_) == local;
    notes.push_back(fmt::format(
        "{} of {} ranks {}", missing, key_.size,
        elsewhere ? "are on other machines" : "are not here, or have not wrapped a model yet"));
  }
  for (const auto& [number, rank] : ranks_) {
    const std::uint64_t lost = rank.process.reader->lost();
    const std::uint64_t invalid = rank.window.invalid();
    if (lost > 0) notes.push_back(fmt::format("rank {}: {} spans were lost", number, lost));
    // Descriptions of earlier worlds may be lost as well, which nobody needs.
    if (rank.process.reader->lost_buckets() > 0 && rank.window.lacks_buckets()) {
      notes.push_back(fmt::format("rank {}: sizes of some buckets are lost", number));
    }
    if (invalid > 0) {
      notes.push_back(fmt::format("rank {}: {} records are invalid", number, invalid));
    }
  }
  return notes;
}

report::Job WatchedJob::recent() const {
  report::Job job;
  job.size = key_.size;
  for (const auto& [number, rank] : ranks_) {
    job.ranks.push_back(trace_of(rank));
    if (job.ranks.back().local_size > 0) job.elsewhere = key_.size - job.ranks.back().local_size;
  }
  job.notes = notes();
  report::choose_group(job);
  return job;
}

std::vector<RankRate> WatchedJob::rates(const report::Job& job) const {
  std::vector<RankRate> rates;
  for (const report::RankTrace& trace : job.ranks) {
    const RankWindow& window = ranks_.at(trace.rank).window;
    const auto* const step = window.last_step();
    rates.push_back({trace.rank, step == nullptr ? 0 : step->step, window.rate(job.model)});
  }
  return rates;
}

std::chrono::duration<double> WatchedJob::idle() const {
  return Clock::now() - last_step_end_;
}

}  // namespace paceline::top
