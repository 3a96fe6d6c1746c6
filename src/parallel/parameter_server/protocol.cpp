#include "parallel/parameter_server/protocol.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include <paceline/error.h>

#include "parallel/parameter_server/shards.h"

namespace paceline::parameter_server {

std::vector<ddp::NamedTensor> served_parameters(const ddp::WrappedModel& model, int servers) {
  auto served = distinct_tensors(model.parameters(), "ParameterServer");
  if (static_cast<std::size_t>(servers) <= served.size()) return served;
  throw UsageError(fmt::format(
      "ParameterServer with {} servers for a model of {} parameters: each server needs one",
      servers, served.size()));
}

std::vector<ddp::Indices> shards_of(const std::vector<ddp::NamedTensor>& parameters, int servers) {
  std::vector<std::size_t> bytes;
  for (const auto& one : parameters) bytes.push_back(one.tensor.nbytes());
  std::vector<ddp::Indices> shards(static_cast<std::size_t>(servers));
  const auto assigned = assign_to_servers(bytes, servers);
  for (std::size_t i = 0; i < assigned.size(); ++i) {
    shards[static_cast<std::size_t>(assigned[i])].push_back(i);
  }
  return shards;
}

Tensors shard_of(const std::vector<ddp::NamedTensor>& parameters, const ddp::Indices& shard) {
  Tensors tensors;
  for (const std::size_t i : shard) tensors.push_back(parameters[i].tensor);
  return tensors;
}

std::string describe(const ddp::WrappedModel& model, const ParameterServerOptions& options) {
  const std::string staleness = options.staleness ? std::to_string(*options.staleness) : "unset";
  return fmt::format("servers = {}\nstaleness = {}\n{}", options.servers, staleness,
                     fmt::join(ddp::describe(model), "\n"));
}

std::string compare(const std::string& server_text, int server, const std::string& worker_text,
                    int worker) {
  if (server_text == worker_text) return "";
  constexpr std::size_t kOptionLines = 2;
  const auto first = ddp::split_lines(server_text);
  const auto other = ddp::split_lines(worker_text);
  for (std::size_t i = 0; i < kOptionLines; ++i) {
    if (first.at(i) == other.at(i)) continue;
    return fmt::format("{} on rank {} and {} on rank {}: it must be the same on all ranks",
                       first[i], server, other[i], worker);
  }
  return ddp::first_difference(std::span(first).subspan(kOptionLines),
                               std::span(other).subspan(kOptionLines), {server, worker});
}

}  // namespace paceline::parameter_server
