#include "shm/p2p/request.h"

#include <fmt/format.h>

namespace paceline::shm {

std::string describe(const P2PMessage& message, bool sending, const Region& region) {
  const std::string peer = message.peer == P2PMessage::kAnyRank
                               ? "any rank"
                               : fmt::format("rank {}", region.global_ranks().of(message.peer));
  return fmt::format("{} of {} {} {} {} with tag {} in group {}", sending ? "send" : "recv",
                     message.count, name(message.type), sending ? "to" : "from", peer, message.tag,
                     region.options().name);
}

}  // namespace paceline::shm
