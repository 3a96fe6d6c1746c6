#include "shm/p2p/request.h"

#include <fmt/format.h>

namespace paceline::shm {

std::string describe(const P2PMessage& message, bool sending, const GlobalRanks& ranks,
                     const Region& region) {
  return fmt::format(
      "{} of {} {} {} {} with tag {} in group {}", sending ? "send" : "recv", message.count,
      name(message.type), sending ? "to" : "from",
      message.peer == P2PMessage::kAnyRank ? "any rank" : ranks.describe({message.peer}),
      message.tag, region.options().name);
}

Failure late_message(const P2PMessage& message, bool sending, int rank, const GlobalRanks& ranks,
                     const Region& region) {
  const std::string within =
      fmt::format("{} {} within the timeout of {} s: {}", sending ? "from" : "to",
                  ranks.describe({rank}), static_cast<double>(message.timeout.count()) / 1000,
                  describe(message, sending, ranks, region));
  if (message.peer == P2PMessage::kAnyRank) {
    return {FailureKind::timeout, RankSet(), "no rank sent " + within};
  }
  const AwaitedRank late =
      follow_waits(region, ranks.of(message.peer), RankSet::all(kMaxWorldSize));
  return {FailureKind::timeout, RankSet{late.rank},
          fmt::format("{} did not {} {}{}", ranks.describe({message.peer}),
                      sending ? "receive" : "send", within, late.chain)};
}

}  // namespace paceline::shm
