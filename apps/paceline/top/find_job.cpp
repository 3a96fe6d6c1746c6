#include "top/find_job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/printable.h"
#include "launch/process_tree.h"

namespace paceline::top {
namespace {

std::string describe(const std::vector<LiveProcess>& ranks) {
  const LiveProcess& first = ranks.front();
  const std::string name = base::printable_line(first.reader->job());
  return fmt::format("  {}process {} ({}), rank {} of {}",
                     name.empty() ? "" : fmt::format("--job {}: ", name), first.pid,
                     program_of(first.pid), first.place.rank, first.place.size);
}

std::vector<std::vector<LiveProcess>> divide(std::vector<LiveProcess> processes) {
  std::vector<std::vector<LiveProcess>> jobs;
  for (LiveProcess& one : processes) {
    const auto job = std::ranges::find_if(
        jobs, [&](const auto& ranks) { return key_of(ranks.front()) == key_of(one); });
    auto& ranks = job == jobs.end() ? jobs.emplace_back() : *job;
    ranks.push_back(std::move(one));
  }
  return jobs;
}

JobKey only_job(std::vector<LiveProcess> processes, std::string_view which) {
  const auto jobs = divide(std::move(processes));
  if (jobs.size() == 1) return key_of(jobs.front().front());
  std::vector<std::string> lines;
  for (const auto& ranks : jobs) lines.push_back(describe(ranks));
  throw UsageError(fmt::format("{} jobs {}; name one by a process{}:\n{}", jobs.size(), which,
                               which == "train" ? " or by --job" : "", fmt::join(lines, "\n")));
}

std::optional<JobKey> job_of_process(pid_t named) {
  const auto process = process_of(named);
  if (!process) throw UsageError(fmt::format("there is no process {}", named));
  if (const auto one = look_into(*process)) return key_of(*one);
  std::vector<LiveProcess> found;
  bool trains = may_train(*process);
  std::exception_ptr unreadable;
  for (const auto& child : launch::descendants(*process)) {
    trains = trains || may_train(child.pid);
    try {
      if (auto one = look_into(child.pid)) found.push_back(std::move(*one));
    } catch (const Error&) {
      unreadable = std::current_exception();
    }
  }
  if (!found.empty()) return only_job(std::move(found), "were started by this process");
  if (unreadable) std::rethrow_exception(unreadable);
  if (trains) return std::nullopt;
  throw UsageError(fmt::format(
      "process {} ({}) does not train: neither it nor a process that it started has loaded "
      "LibTorch. Name a rank, or its launcher",
      *process, program_of(*process)));
}

}  // namespace

JobKey key_of(const LiveProcess& process) {
  const int size = process.place.size;
  std::string name = process.reader->job();
  // Ranks do not learn it at the same moment, so a name, which they all have, counts for more.
  const std::uint64_t identity = name.empty() ? process.reader->identity() : 0;
  return {std::move(name), process.reader->port(), size, size == 1 ? process.pid : 0, identity};
}

std::vector<LiveProcess> ranks_of(const JobKey& job) {
  auto ranks = all_live_processes();
  std::erase_if(ranks, [&](const LiveProcess& one) { return key_of(one) != job; });
  std::ranges::sort(ranks, {}, [](const LiveProcess& one) { return one.place.rank; });
  return ranks;
}

std::optional<JobKey> find_job(const Target& target) {
  if (target.process) return job_of_process(*target.process);
  auto all = all_live_processes();
  if (target.job) {
    const std::string name = target.job->substr(0, trace::kLongestJob);
    std::vector<LiveProcess> named;
    for (LiveProcess& one : all) {
      if (one.reader->job() == name) named.push_back(std::move(one));
    }
    if (!named.empty()) return only_job(std::move(named), "have this name");
    if (is_started(*target.job)) return std::nullopt;
    throw UsageError(fmt::format(
        "no job on this machine has the name {}; a launcher gives it (--rdzv-id)", *target.job));
  }
  std::erase_if(all, [](const LiveProcess& one) { return !one.is_this_users(); });
  if (!all.empty()) return only_job(std::move(all), "train");
  throw UsageError(
      "no process of this user trains with DistributedDataParallel on this machine. To wait for "
      "one, name its process or its launcher's");
}

}  // namespace paceline::top
