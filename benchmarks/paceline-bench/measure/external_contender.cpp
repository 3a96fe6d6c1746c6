#include "measure/external_contender.h"

#include <paceline/distributed.h>

#include <memory>
#include <utility>

namespace paceline::bench {

Contender external_contender(PeerProgram program, int calls) {
  Contender contender{program.name, "", {}, {}, calls};
  const auto peer = get_rank() == 0 ? std::make_shared<ExternalPeer>(std::move(program)) : nullptr;
  contender.elsewhere = [peer](int count) { return peer ? peer->measure(count) : Sample(); };
  return contender;
}

}  // namespace paceline::bench
