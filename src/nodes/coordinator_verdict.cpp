// How a job on several nodes ends, and whether it starts again.
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>

#include "launch/clip.h"
#include "launch/report.h"
#include "nodes/coordinator.h"

namespace paceline::nodes {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

constexpr auto kFlushLimit = 5s;
constexpr std::size_t kMaxReport = std::size_t{1} << 20;

}  // namespace

void Coordinator::finish_if_all_reported() {
  const bool all = std::ranges::all_of(
      members_, [](const Member& member) { return member.result || !member.problem.empty(); });
  if (!all) return;
  const launch::JobResult result = collect();
  const bool is_failure = result.first_failed().has_value();
  const bool cannot_start = std::ranges::any_of(
      members_, [](const Member& member) { return member.result && !member.problem.empty(); });
  const bool has_stopped = std::ranges::any_of(result.ranks, [](const launch::RankResult& rank) {
    return rank.stopped || (rank.status != 0 && !rank.tolerated) || rank.lost;
  });
  // What ends after the request to stop is no failure of its own.
  const bool regroups = regrouping_ && has_stopped;
  const bool restarts = is_failure && restart_ < rules_.max_restarts;
  if (signal_ != 0 || cannot_start || (!regroups && !restarts)) {
    return give({.exit_code = result.exit_code(),
                 .signal = result.first_failed() ? 0 : signal_,
                 .report = launch::clip(launch::failure_report(result), kMaxReport)});
  }
  Verdict verdict{.restarts = true, .report = ""};
  if (regroups) {
    verdict.report = "paceline: starts all processes again, as a node has come\n";
  } else {
    ++restart_;
    verdict.report = launch::clip(launch::failure_report(result), kMaxReport) +
                     fmt::format("paceline: starts all processes again, restart {} of {}\n",
                                 restart_, rules_.max_restarts);
  }
  send_to_all(verdict);
  gather();
}

// Ends on this machine's clock: a node's first failure was when it reported it.
launch::JobResult Coordinator::collect() const {
  launch::JobResult result{.ranks = {}, .signal = signal_, .nodes = {}};
  launch::JobResult heard{.ranks = {}, .signal = signal_};
  for (const Member& member : members_) {
    if (!member.problem.empty()) continue;
    heard.ranks.insert(heard.ranks.end(), member.result->ranks.begin(), member.result->ranks.end());
  }
  // All ranks save and leave together, or none.
  const bool preempted = heard.preempted();
  for (const Member& member : members_) {
    // The signal came to all launchers, and ends the job.
    const bool was_stopped = member.left_by != 0 && signal_ != 0 && !member.tolerated;
    result.nodes.push_back({member.join.host, member.first_rank, member.join.processes,
                            was_stopped ? "" : member.problem});
    if (!member.problem.empty()) {
      launch::RankResult rank;
      rank.ended = member.failed.value_or(started_) - started_;
      rank.status =
          was_stopped && preempted ? W_EXITCODE(launch::kPreemptedCode, 0) : member.left_by;
      rank.stopped = was_stopped;
      rank.tolerated = member.tolerated;
      rank.lost = !was_stopped && !member.tolerated;
      result.ranks.insert(result.ranks.end(), static_cast<std::size_t>(member.join.processes),
                          rank);
      continue;
    }
    std::vector<launch::RankResult> ranks = member.result->ranks;
    std::optional<std::chrono::nanoseconds> first;
    for (const auto& rank : ranks) {
      if (launch::is_failure(rank.status) && !rank.stopped && !rank.tolerated &&
          (!first || rank.ended < *first)) {
        first = rank.ended;
      }
    }
    if (first && member.failed) {
      for (auto& rank : ranks) rank.ended += (*member.failed - started_) - *first;
    }
    result.ranks.insert(result.ranks.end(), ranks.begin(), ranks.end());
  }
  return result;
}

void Coordinator::give(const Verdict& verdict) {
  phase_ = Phase::over;
  flush_deadline_ = Deadline::after(kFlushLimit);
  for (const auto& node : nodes_) {
    if (!node->join || node->leaving) continue;
    Verdict its = verdict;
    if (!members_.empty() && !node->member) {
      its.report += "paceline: the job has ended without this node\n";
    }
    node->connection.send(encode(its));
  }
  listener_.reset();
  port_.reset();
}

}  // namespace paceline::nodes
