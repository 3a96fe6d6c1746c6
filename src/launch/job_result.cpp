#include "launch/job_result.h"

#include <sys/wait.h>

namespace paceline::launch {
namespace {

bool failed_by_itself(const RankResult& rank) {
  return rank.status != 0 && !rank.stopped;
}

// The rank that `rank`'s error is about, if that failed by itself too.
std::optional<int> culprit(const std::vector<RankResult>& ranks, int rank) {
  const auto& error = ranks[static_cast<std::size_t>(rank)].error;
  if (!error) return std::nullopt;
  for (const int blamed : error->blamed_ranks) {
    if (blamed >= 0 && blamed < static_cast<int>(ranks.size()) && blamed != rank &&
        failed_by_itself(ranks[static_cast<std::size_t>(blamed)])) {
      return blamed;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<int> JobResult::first_failed() const {
  std::optional<int> first;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (failed_by_itself(ranks[rank]) &&
        (!first || ranks[rank].order < ranks[static_cast<std::size_t>(*first)].order)) {
      first = static_cast<int>(rank);
    }
  }
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
    return exit_code_of(ranks[static_cast<std::size_t>(*rank)].status);
  }
  return signal != 0 ? 128 + signal : 0;
}

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace paceline::launch
