#include "checkpoint/agreement.h"

#include <fmt/format.h>

#include <paceline/collectives.h>

#include "distributed/process_state.h"

namespace paceline::checkpoint {

std::string first_problem(const std::string& own, const ProcessGroup& group) {
  const auto all = all_gather_bytes(own, {.group = group});
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    return fmt::format("rank {}: {}", distributed::global_rank_of(group, static_cast<int>(rank)),
                       all[rank]);
  }
  return "";
}

}  // namespace paceline::checkpoint
