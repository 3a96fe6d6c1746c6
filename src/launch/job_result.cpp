#include "launch/job_result.h"

#include <sys/wait.h>

namespace paceline::launch {
namespace {

bool failed_by_itself(const RankResult& rank) {
  return rank.lost || (rank.status != 0 && !rank.stopped);
}

int code_of(const RankResult& rank) {
  return rank.lost ? 1 : exit_code_of(rank.status);
}

// The rank that `rank`'s error is about, if that ended by itself: with a failure, or else with 0.
std::optional<int> culprit(const std::vector<RankResult>& ranks, int rank) {
  const auto& error = ranks[static_cast<std::size_t>(rank)].error;
  if (!error) return std::nullopt;
  std::optional<int> ended_early;
  for (const int blamed : error->blamed_ranks) {
    if (blamed < 0 || blamed >= static_cast<int>(ranks.size()) || blamed == rank) continue;
    const RankResult& other = ranks[static_cast<std::size_t>(blamed)];
    if (failed_by_itself(other)) return blamed;
    if (!other.stopped && !ended_early) ended_early = blamed;
  }
  return ended_early;
}

std::optional<int> earliest_failure(const std::vector<RankResult>& ranks) {
  std::optional<int> first;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (failed_by_itself(ranks[rank]) &&
        (!first || ranks[rank].ended < ranks[static_cast<std::size_t>(*first)].ended)) {
      first = static_cast<int>(rank);
    }
  }
  return first;
}

}  // namespace

std::optional<int> JobResult::first_failed() const {
  const auto first = earliest_failure(ranks);
  if (!first) return std::nullopt;
  // Ranks may blame each other in a circle; as many steps as there are ranks are enough.
  int at = *first;
  for (std::size_t step = 0; step < ranks.size(); ++step) {
    const auto next = culprit(ranks, at);
    if (!next) return at;
    at = *next;
  }
  return first;
}

int JobResult::exit_code() const {
  if (const auto rank = first_failed()) {
    const int code = code_of(ranks[static_cast<std::size_t>(*rank)]);
    return code != 0 ? code : code_of(ranks[static_cast<std::size_t>(*earliest_failure(ranks))]);
  }
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
