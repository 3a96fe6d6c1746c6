#include "distributed/place.h"

#include <mutex>

#include <paceline/distributed.h>

#include "base/environment.h"

namespace paceline {
namespace distributed {

Place place_in(const ActiveWorld* world) {
  if (world == nullptr || world->group->getSize() == 1) {
    const auto& environment = base::environment();
    return {environment.node_rank.value_or(0), environment.local_rank.value_or(0),
            environment.local_world_size.value_or(1)};
  }
  const int rank = world->group->getRank();
  const int node = world->topology->node_of(rank);
  return {node, world->topology->local_rank_of(rank), world->topology->local_size(node)};
}

}  // namespace distributed

namespace {

distributed::Place current_place() {
  auto& state = distributed::ProcessState::instance();
  std::lock_guard lock(state.mutex);
  return distributed::place_in(state.world.get());
}

}  // namespace

int get_local_rank() {
  return current_place().local_rank;
}
int get_local_world_size() {
  return current_place().local_size;
}
int get_node_rank() {
  return current_place().node;
}

}  // namespace paceline
