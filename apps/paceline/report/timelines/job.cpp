#include "report/timelines/job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>

#include <paceline/error.h>

namespace paceline::report {
namespace {

bool is_timeline(std::string_view name) {
  constexpr std::string_view begin = "rank";
  constexpr std::string_view end = ".json";
  if (name.size() <= begin.size() + end.size()) return false;
  const auto digits = name.substr(begin.size(), name.size() - begin.size() - end.size());
  return name.starts_with(begin) && name.ends_with(end) &&
         digits.find_first_not_of("0123456789") == digits.npos;
}

// The first and last moment. Of an empty timeline, `begin` is after `end`.
struct Extent {
  Clock::time_point begin = Clock::time_point::max();
  Clock::time_point end = Clock::time_point::min();
};

Extent extent_of(const RankTrace& trace) {
  Extent extent;
  for (const Span& span : trace.spans) {
    extent.begin = std::min(extent.begin, span.begin);
    extent.end = std::max(extent.end, span.end);
  }
  return extent;
}

bool overlap(const Extent& a, const Extent& b) {
  return a.begin > a.end || b.begin > b.end || (a.begin <= b.end && b.begin <= a.end);
}

// Why a timeline cannot be compared with `newest`; empty if it can.
std::string misfit(const RankTrace& trace, const RankTrace& newest) {
  if (trace.size != newest.size) {
    return fmt::format("belongs to another job, of {} ranks instead of {}", trace.size,
                       newest.size);
  }
  if (trace.boot != newest.boot) {
    return "was written on another machine, or before a reboot, and has another clock";
  }
  // The ranks of a job start together, though short ones may not have a moment in common.
  constexpr std::int64_t kTogether = 10'000'000;
  if (newest.started - trace.started > kTogether && !overlap(extent_of(trace), extent_of(newest))) {
    return "belongs to an earlier job";
  }
  return "";
}

std::string missing_ranks(const Job& job) {
  std::vector<std::string> ranges;
  int next = 0;
  const auto close = [&](int end) {
    if (next < end - 1) ranges.push_back(fmt::format("{}-{}", next, end - 1));
    if (next == end - 1) ranges.push_back(fmt::format("{}", next));
  };
  for (const RankTrace& trace : job.ranks) {
    close(trace.rank);
    next = trace.rank + 1;
  }
  close(job.size);
  return fmt::format("rank{} {}", job.size - std::ssize(job.ranks) == 1 ? "" : "s",
                     fmt::join(ranges, ", "));
}

void note_gaps(const RankTrace& trace, std::vector<std::string>& notes) {
  const auto note = [&](const std::string& what) {
    notes.push_back(fmt::format("{} {}", trace.path, what));
  };
  if (trace.full) note("reached its size limit and ends before the run does");
  if (trace.truncated)
    note("is incomplete: its rank was killed, its disk was full, or it is still running");
  if (trace.dropped > 0) note(fmt::format("lacks {} spans that were dropped", trace.dropped));
  if (trace.foreign > 0) {
    note(fmt::format("has {} events that are invalid or not Paceline's", trace.foreign));
  }
}

}  // namespace

Job merge(std::vector<RankTrace> traces) {
  const auto newest = std::ranges::max_element(traces, {}, &RankTrace::started);
  std::iter_swap(traces.begin(), newest);
  Job job;
  job.size = traces.front().size;
  const std::string boot = traces.front().boot;
  std::set<int> seen;
  std::set<int> elsewhere;
  for (RankTrace& trace : traces) {
    if (trace.size == job.size && trace.boot != boot) elsewhere.insert(trace.rank);
    std::string why = job.ranks.empty() ? "" : misfit(trace, job.ranks.front());
    if (why.empty() && !seen.insert(trace.rank).second) {
      why = fmt::format("names rank {}, as another file does", trace.rank);
    }
    if (why.empty()) {
      job.ranks.push_back(std::move(trace));
    } else {
      job.notes.push_back(fmt::format("{} {}; it is ignored", trace.path, why));
    }
  }
  std::ranges::sort(job.ranks, {}, &RankTrace::rank);
  if (std::ssize(job.ranks) < job.size) {
    job.notes.push_back(
        fmt::format("there is no timeline of {} (of {} ranks)", missing_ranks(job), job.size));
  }
  for (const RankTrace& trace : job.ranks) {
    elsewhere.erase(trace.rank);
    note_gaps(trace, job.notes);
  }
  job.elsewhere = static_cast<int>(elsewhere.size());
  return job;
}

Job read_job(const std::filesystem::path& directory) {
  std::error_code code;
  std::vector<std::filesystem::path> paths;
  for (auto it = std::filesystem::directory_iterator(directory, code);
       !code && it != std::filesystem::directory_iterator(); it.increment(code)) {
    if (is_timeline(it->path().filename().string())) paths.push_back(it->path());
  }
  if (code) throw UsageError(fmt::format("{}: {}", directory.string(), code.message()));
  if (paths.empty()) {
    throw UsageError(fmt::format("no rank*.json in {}: start the program with PACELINE_TIMELINE={}",
                                 directory.string(), directory.string()));
  }
  std::ranges::sort(paths);
  std::vector<RankTrace> traces;
  std::vector<std::string> notes;
  std::exception_ptr first;
  for (const auto& path : paths) {
    try {
      traces.push_back(read_timeline(path));
    } catch (const Error& error) {
      if (!first) first = std::current_exception();
      notes.push_back(fmt::format("{}; it is ignored", error.what()));
    }
  }
  if (traces.empty()) std::rethrow_exception(first);
  Job job = merge(std::move(traces));
  job.notes.insert(job.notes.begin(), notes.begin(), notes.end());
  return job;
}

}  // namespace paceline::report
