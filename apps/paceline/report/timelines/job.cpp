#include "report/timelines/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include <paceline/error.h>

#include "base/number_list.h"

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

std::string describe_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", base::list_text(ranks));
}

std::vector<int> missing_ranks(const Job& job) {
  std::vector<int> missing;
  int next = 0;
  for (const RankTrace& trace : job.ranks) {
    while (next < trace.rank) missing.push_back(next++);
    next = trace.rank + 1;
  }
  while (next < job.size) missing.push_back(next++);
  return missing;
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

double microseconds(const Span& span) {
  return std::chrono::duration<double, std::micro>(span.end - span.begin).count();
}

void choose_model(Job& job) {
  std::map<std::uint64_t, double> times;
  for (const RankTrace& trace : job.ranks) {
    for (const Span& span : trace.spans) {
      if (span.kind == Kind::step) times[span.model] += microseconds(span);
    }
  }
  job.models = times.size();
  const auto most = std::ranges::max_element(times, {}, [](auto& entry) { return entry.second; });
  if (most != times.end()) job.model = most->first;
}

// Of the main model.
std::vector<int> slowest_group(const Job& job) {
  struct Waits {
    double sum = 0;
    double ranks = 0;
  };
  std::map<std::vector<int>, Waits> groups;
  for (const RankTrace& trace : job.ranks) {
    double waits = 0;
    bool trains = false;
    for (const Span& span : trace.spans) {
      if (span.model != job.model) continue;
      trains = trains || span.kind == Kind::step;
      if (span.kind == Kind::wait || span.kind == Kind::pre_forward_sync) {
        waits += microseconds(span);
      }
    }
    if (!trains) continue;
    Waits& group = groups[group_of(trace, job.model)];
    group.sum += waits;
    ++group.ranks;
  }
  const auto most = std::ranges::max_element(
      groups, {}, [](auto& entry) { return entry.second.sum / entry.second.ranks; });
  return most == groups.end() ? std::vector<int>() : most->first;
}

}  // namespace

std::vector<int> group_of(const RankTrace& trace, std::uint64_t model) {
  const auto found = trace.groups.find(model);
  if (found == trace.groups.end() || !std::ranges::binary_search(found->second, trace.rank)) {
    return {};
  }
  return found->second;
}

std::vector<const RankTrace*> all_traces(const Job& job) {
  std::vector<const RankTrace*> traces;
  for (const auto* const ranks : {&job.ranks, &job.others}) {
    for (const RankTrace& trace : *ranks) traces.push_back(&trace);
  }
  return traces;
}

void choose_group(Job& job) {
  job.group_size = job.size;
  choose_model(job);
  const std::vector<int> group = slowest_group(job);
  if (group.empty()) return;
  job.group_size = static_cast<int>(group.size());
  const auto rest = std::stable_partition(
      job.ranks.begin(), job.ranks.end(),
      [&](const RankTrace& trace) { return std::ranges::binary_search(group, trace.rank); });
  if (rest == job.ranks.end()) return;
  std::vector<int> left_out;
  for (auto trace = rest; trace != job.ranks.end(); ++trace) {
    left_out.push_back(trace->rank);
    job.others.push_back(std::move(*trace));
  }
  job.ranks.erase(rest, job.ranks.end());
  job.notes.push_back(fmt::format(
      "the judgement is about {}, which train{} model {} {}; {} {}", describe_ranks(group),
      group.size() == 1 ? "s" : "", job.model, group.size() == 1 ? "alone" : "together",
      describe_ranks(left_out), left_out.size() == 1 ? "does not" : "do not"));
}

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
    job.notes.push_back(fmt::format("there is no timeline of {} (of {} ranks)",
                                    describe_ranks(missing_ranks(job)), job.size));
  }
  for (const RankTrace& trace : job.ranks) {
    elsewhere.erase(trace.rank);
    note_gaps(trace, job.notes);
  }
  job.elsewhere = static_cast<int>(elsewhere.size());
  choose_group(job);
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
