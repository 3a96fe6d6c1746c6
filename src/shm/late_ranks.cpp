#include "shm/late_ranks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

namespace paceline::shm {
namespace {

// Where a rank is in what is waited for; if it is missing, also which rank it exchanges a message
// with, and whether its process is stopped.
std::string state_of(const Region& region, int rank, bool missing, const WaitContext& context) {
  std::vector<std::string> texts{context.last_seen(rank, missing)};
  if (missing) {
    if (const auto other = region.awaited_by(region.global_ranks().of(rank))) {
      texts.push_back(fmt::format("it waits for rank {}", *other));
    }
    texts.push_back(region.peers().describe_stop(rank));
  }
  std::erase(texts, "");
  return fmt::format("{}", fmt::join(texts, ", and "));
}

std::string describe_waiting(const Region& region, const LateRanks& late,
                             const WaitContext& context) {
  RankSet waiting;
  for (int rank = 0; rank < region.size(); ++rank) {
    const bool waits = !late.missing.contains(rank) && context.waits(rank);
    if (waits || rank == region.rank()) waiting.insert(rank);
  }
  return fmt::format("{} {}", region.global_ranks().describe(waiting), has_or_have(waiting));
}

}  // namespace

LateRanks find_late_ranks(const Region& region, int peer, const WaitContext& context) {
  LateRanks late;
  late.on_other_nodes = context.missing_on_other_nodes();
  if (late.on_other_nodes.empty()) {
    late.missing = context.missing() | RankSet{peer};
    const RankSet missing = region.global_ranks().of(late.missing);
    for (int rank = 0; rank < region.size(); ++rank) {
      const int global = region.global_ranks().of(rank);
      if (missing.contains(global) && follow_waits(region, global, missing).rank == global) {
        late.ranks.insert(rank);
      }
    }
    late.names = region.global_ranks().describe(late.ranks);
  } else {
    late.names = context.describe_on_other_nodes(late.on_other_nodes);
  }
  late.where = context.describe();
  for (int rank = 0; rank < region.size(); ++rank) {
    const std::string state = state_of(region, rank, late.missing.contains(rank), context);
    if (!state.empty()) {
      late.where += fmt::format("; rank {}: {}", region.global_ranks().of(rank), state);
    }
  }
  return late;
}

AwaitedRank follow_waits(const Region& region, int peer, const RankSet& among) {
  AwaitedRank found{peer};
  RankSet seen{region.global_ranks().of(region.rank())};
  for (int rank = peer; !seen.contains(rank);) {
    seen.insert(rank);
    found.rank = rank;
    const auto here = region.find(rank);
    const std::string stop = here ? region.peers().describe_stop(*here) : "";
    // What a rank waited for when it was stopped does not matter.
    const int next = stop.empty() ? region.awaited_by(rank).value_or(-1) : -1;
    if (!stop.empty()) found.chain += fmt::format("; rank {}: {}", rank, stop);
    if (next < 0 || !among.contains(next)) return found;
    found.chain += fmt::format("; rank {} waits for rank {}", rank, next);
    rank = next;
  }
  found.rank = peer;
  found.chain +=
      "; they wait for each other: send and receive in one batch_isend_irecv, or one rank receives "
      "first";
  return found;
}

void report_late_ranks(Region& region, int peer, WaitContext& context) {
  using Report = base::WaitReport;
  context.report.check([&](const std::string& waited,
                           Report::Clock::time_point since) -> std::optional<Report::Text> {
    const LateRanks late = find_late_ranks(region, peer, context);
    if (!region.claim_report(late.ranks.empty() ? peer : *late.ranks.begin(), since)) return {};
    return Report::Text{
        fmt::format("{} waited {} for {} at {}", describe_waiting(region, late, context), waited,
                    late.names, late.where),
        context.describe()};
  });
}

}  // namespace paceline::shm
