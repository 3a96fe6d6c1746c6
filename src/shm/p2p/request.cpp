#include "shm/p2p/request.h"

#include <fmt/format.h>

namespace paceline::shm {

std::string describe(const P2PRequest& request, const Region& region) {
  const P2PMessage& message = request.message;
  const std::string peer = message.peer == P2PMessage::kAnyRank
                               ? "any rank"
                               : fmt::format("rank {}", region.global_ranks().of(message.peer));
  return fmt::format("{} of {} {} {} {} with tag {} in group {}", context_of(request).operation,
                     message.count, name(message.type), request.sending ? "to" : "from", peer,
                     message.tag, region.options().name);
}

}  // namespace paceline::shm
