#include "backends/paceline/state.h"

#include <nlohmann/json.hpp>

#include "shm/buckets/step_state.h"
#include "shm/collectives/call_state.h"

namespace paceline::backends {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string describe_group(const shm::Region& region, const shm::Mailbox& mailbox) {
  Json json{{"name", region.options().name}, {"backend", "paceline"},
            {"rank", region.rank()},         {"size", region.size()},
            {"ranks", Json::array()},        {"messages", mailbox.describe_requests()}};
  const auto states = shm::read_call_states(region);
  for (int rank = 0; rank < region.size(); ++rank) {
    const auto& state = states[static_cast<std::size_t>(rank)];
    Json one{{"rank", state.rank},
             {"call", state.call},
             {"operation", state.operation},
             {"waits", state.waits}};
    if (region.peers().has_left(rank)) one["left"] = true;
    if (rank != region.rank()) {
      const std::string stop = region.peers().describe_stop(rank);
      if (!stop.empty()) one["process"] = stop;
    }
    json["ranks"].push_back(std::move(one));
  }
  if (region.failed()) json["failure"] = region.failure().text;
  return dump(json);
}

std::string describe_step(const shm::ControlBlocks& blocks) {
  const std::vector<std::string>& buckets = blocks.contents();
  Json json{{"group", blocks.region().options().name},
            {"step", blocks.step()},
            {"buckets", buckets},
            {"ranks", Json::array()}};
  for (const auto& state : shm::read_step_states(blocks)) {
    Json one{{"rank", state.rank},
             {"phase", state.phase},
             {"buckets_ready", state.ready},
             {"buckets_reduced", state.reduced}};
    if (state.ready > 0 && state.last < buckets.size()) one["last_ready"] = buckets[state.last];
    json["ranks"].push_back(std::move(one));
  }
  return dump(json);
}

}  // namespace paceline::backends
