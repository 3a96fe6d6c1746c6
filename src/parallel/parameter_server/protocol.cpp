#include "parallel/parameter_server/protocol.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>
#include <utility>

#include <paceline/error.h>

#include "parallel/parameter_server/shards.h"

namespace paceline::parameter_server {
namespace {

// In place of a version; the number of late workers follows, and the rank of each.
constexpr std::int64_t kLate = -1;

}  // namespace

void send_late(Pair& pair, const std::vector<int>& ranks) {
  pair.send_number(kLate);
  pair.send_number(static_cast<std::int64_t>(ranks.size()));
  for (const int rank : ranks) pair.send_number(rank);
}

std::int64_t receive_version(Pair& pair, const char* operation, std::chrono::milliseconds limit) {
  const std::int64_t version = pair.receive_number();
  if (version != kLate) return version;
  std::vector<int> ranks;
  for (auto count = pair.receive_number(); count > 0; --count) {
    ranks.push_back(static_cast<int>(pair.receive_number()));
  }
  const auto text = fmt::format(
      "{}: {} {}, which others wait for, made no step within the timeout of {} s", operation,
      ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "), limit.count() / 1000.0);
  throw Timeout(text, std::move(ranks), operation, 0);
}

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
  return fmt::format("staleness = {}\n{}", staleness, fmt::join(ddp::describe(model), "\n"));
}

std::string compare(const std::string& server_text, int server, const std::string& worker_text,
                    int worker) {
  if (server_text == worker_text) return "";
  const auto first = ddp::split_lines(server_text);
  const auto other = ddp::split_lines(worker_text);
  if (first.at(0) != other.at(0)) {
    return ddp::option_difference(first[0], other[0], {server, worker});
  }
  return ddp::first_difference(std::span(first).subspan(1), std::span(other).subspan(1),
                               {server, worker});
}

}  // namespace paceline::parameter_server
