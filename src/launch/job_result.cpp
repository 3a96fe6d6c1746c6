#include "launch/job_result.h"

#include <sys/wait.h>

#include <algorithm>
#include <numeric>

namespace paceline::launch {
namespace {

bool failed_by_itself(const RankResult& rank) {
  return rank.lost || (is_failure(rank.status) && !rank.stopped && !rank.tolerated);
}

int code_of(const RankResult& rank) {
  return rank.lost ? 1 : exit_code_of(rank.status);
}

bool earlier(const std::vector<RankResult>& ranks, int a, std::optional<int> b) {
  const auto ended = [&](int rank) { return ranks[static_cast<std::size_t>(rank)].ended; };
  return !b || ended(a) < ended(*b);
}

// The other ranks that `rank`'s error is about, of those that ended by themselves.
std::vector<int> blamed_by(const std::vector<RankResult>& ranks, int rank) {
  std::vector<int> blamed;
  const auto& error = ranks[static_cast<std::size_t>(rank)].error;
  if (!error) return blamed;
  std::vector<int> named = error->blamed_ranks;
  if (std::ranges::count(named, kUnknownRank) > 0) {
    named.resize(ranks.size());
    std::iota(named.begin(), named.end(), 0);
  }
  for (const int other : named) {
    if (other < 0 || other >= static_cast<int>(ranks.size()) || other == rank) continue;
    const RankResult& its = ranks[static_cast<std::size_t>(other)];
    if (its.lost || (!its.stopped && !its.tolerated)) blamed.push_back(other);
  }
  return blamed;
}

std::optional<int> earliest_failure(const std::vector<RankResult>& ranks) {
  std::optional<int> first;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const int number = static_cast<int>(rank);
    if (failed_by_itself(ranks[rank]) && earlier(ranks, number, first)) first = number;
  }
  return first;
}

}  // namespace

bool is_failure(int status) {
  return status != 0 && exit_code_of(status) != kPreemptedCode;
}

std::optional<int> JobResult::first_failed() const {
  const auto first = earliest_failure(ranks);
  if (!first) return std::nullopt;
  std::vector<int> found{*first};  // and who they blame; they may do so in a circle
  std::vector<bool> is_found(ranks.size());
  is_found[static_cast<std::size_t>(*first)] = true;
  std::optional<int> failed;       // the earliest that blames nobody
  std::optional<int> ended_early;  // with code 0
  for (std::size_t i = 0; i < found.size(); ++i) {
    const int rank = found[i];
    const auto blamed = blamed_by(ranks, rank);
    if (!failed_by_itself(ranks[static_cast<std::size_t>(rank)])) {
      if (earlier(ranks, rank, ended_early)) ended_early = rank;
    } else if (blamed.empty() && earlier(ranks, rank, failed)) {
      failed = rank;
    }
    for (const int other : blamed) {
      if (is_found[static_cast<std::size_t>(other)]) continue;
      is_found[static_cast<std::size_t>(other)] = true;
      found.push_back(other);
    }
  }
  return failed ? failed : ended_early ? ended_early : first;
}

bool JobResult::preempted() const {
  const auto has_failed = [](const RankResult& rank) {
    return rank.lost || (is_failure(rank.status) && !rank.tolerated);
  };
  return std::ranges::none_of(ranks, has_failed) &&
         std::ranges::any_of(
             ranks, [](const RankResult& rank) { return rank.status != 0 && !rank.tolerated; });
}

int JobResult::exit_code() const {
  if (const auto first = first_failed()) {
    const RankResult& rank = ranks[static_cast<std::size_t>(*first)];
    if (failed_by_itself(rank)) return code_of(rank);
    return code_of(ranks[static_cast<std::size_t>(*earliest_failure(ranks))]);
  }
  if (preempted()) return kPreemptedCode;
  return signal != 0 ? 128 + signal : 0;
}

std::optional<int> JobResult::node_of(int rank) const {
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    const int local = rank - nodes[node].first_rank;
    if (local >= 0 && local < nodes[node].processes) return static_cast<int>(node);
  }
  return std::nullopt;
}

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace paceline::launch
