#include "nodes/messages.h"

#include <array>
#include <csignal>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>

#include "launch/job.h"
#include "launch/report.h"

namespace paceline::nodes {
namespace {

// nlohmann's own conversion would cut a number that does not fit. Throws its exception.
template <typename Integer = int>
Integer to_integer(const nlohmann::json& value, Integer low = 0,
                   Integer high = std::numeric_limits<Integer>::max()) {
  if (value.is_number_integer()) {
    const auto number = value.get<std::int64_t>();
    const bool is_too_large = value.is_number_unsigned() && number < 0;
    if (number >= low && number <= high && !is_too_large) return static_cast<Integer>(number);
  }
  throw nlohmann::json::other_error::create(500, "a number out of range", &value);
}

int integer(const nlohmann::json& body, const char* name, int low = 0,
            int high = std::numeric_limits<int>::max()) {
  return to_integer(body.at(name), low, high);
}

std::vector<int> blamed_ranks(const nlohmann::json& json) {
  std::vector<int> ranks;
  for (const auto& rank : json.at("blamed_ranks")) {
    ranks.push_back(to_integer(rank, launch::kUnknownRank));
  }
  return ranks;
}

}  // namespace
}  // namespace paceline::nodes

namespace paceline::launch {

// Found by nlohmann's library, which looks in the type's namespace.
void to_json(nlohmann::json& json, const RankResult& rank) {
  json = {{"status", rank.status},
          {"ended_ns", rank.ended.count()},
          {"stopped", rank.stopped},
          {"tolerated", rank.tolerated},
          {"last_lines", rank.last_lines}};
  if (!rank.error) return;
  json["error"] = {{"message", rank.error->message}, {"blamed_ranks", rank.error->blamed_ranks}};
}

void from_json(const nlohmann::json& json, RankResult& rank) {
  rank.status = nodes::integer(json, "status");
  constexpr std::int64_t kLongest = std::int64_t{1} << 60;
  rank.ended = std::chrono::nanoseconds(
      nodes::to_integer<std::int64_t>(json.at("ended_ns"), -kLongest, kLongest));
  rank.stopped = json.at("stopped");
  rank.tolerated = json.at("tolerated");
  rank.last_lines = json.at("last_lines").get<std::vector<std::string>>();
  if (!json.contains("error")) return;
  const auto& error = json.at("error");
  rank.error = ErrorFile{error.at("message"), {}};
  rank.error->blamed_ranks = nodes::blamed_ranks(error);
}

}  // namespace paceline::launch

namespace paceline::nodes {
namespace {

using nlohmann::json;

constexpr std::array kNames{"join",  "welcome", "refuse",  "start",  "failed", "signal",
                            "leave", "result",  "verdict", "notice", "ping"};

json encode_body(const Join& join) {
  json body = {{"version", join.version},
               {"job", join.job},
               {"host", join.host},
               {"processes", join.processes},
               {"min_nodes", join.min_nodes},
               {"max_nodes", join.max_nodes},
               {"tolerate_loss", join.tolerate_loss},
               {"role", join.role}};
  if (join.node) body["node"] = *join.node;
  if (join.max_restarts) body["max_restarts"] = *join.max_restarts;
  return body;
}

json encode_body(const Refuse& refuse) {
  return {{"reason", refuse.reason}};
}

json encode_body(const Start& start) {
  return {{"restart", start.restart},
          {"max_restarts", start.max_restarts},
          {"tolerate_loss", start.tolerate_loss},
          {"nodes", start.nodes},
          {"node", start.node},
          {"first_rank", start.first_rank},
          {"world_size", start.world_size},
          {"first_role_rank", start.first_role_rank},
          {"role_world_size", start.role_world_size},
          {"job", start.job},
          {"master_addr", start.master_addr},
          {"master_port", start.master_port}};
}

json encode_body(const Failed& failed) {
  return {{"blamed_ranks", failed.blamed_ranks}};
}

json encode_body(const Welcome&) {
  return json::object();
}

json encode_body(const Ping&) {
  return json::object();
}

json encode_body(const Signal& signal) {
  return {{"number", signal.number}};
}

json encode_body(const Leave& leave) {
  return {{"signal", leave.signal}};
}

json encode_body(const Result& result) {
  return {{"ranks", result.ranks}, {"problem", result.problem}};
}

json encode_body(const Verdict& verdict) {
  return {{"restarts", verdict.restarts},
          {"exit_code", verdict.exit_code},
          {"signal", verdict.signal},
          {"report", verdict.report}};
}

json encode_body(const Notice& notice) {
  return {{"text", notice.text}};
}

void decode_body(const json& body, Join& join) {
  join.version = body.at("version");
  join.job = body.at("job");
  join.host = body.at("host");
  join.processes = integer(body, "processes", 1, launch::kMaxProcesses);
  join.min_nodes = integer(body, "min_nodes", 1);
  join.max_nodes = integer(body, "max_nodes", 1);
  if (body.contains("node")) join.node = integer(body, "node");
  if (body.contains("max_restarts")) join.max_restarts = integer(body, "max_restarts");
  // Other versions, which are refused by their number, may lack these.
  join.tolerate_loss = body.value("tolerate_loss", false);
  join.role = body.value("role", join.role);
}

void decode_body(const json& body, Refuse& refuse) {
  refuse.reason = body.at("reason");
}

void decode_body(const json& body, Start& start) {
  start.restart = integer(body, "restart");
  start.max_restarts = integer(body, "max_restarts");
  start.tolerate_loss = body.at("tolerate_loss");
  start.nodes = integer(body, "nodes");
  start.node = integer(body, "node");
  start.first_rank = integer(body, "first_rank");
  start.world_size = integer(body, "world_size");
  start.first_role_rank = integer(body, "first_role_rank");
  start.role_world_size = integer(body, "role_world_size");
  start.job = body.at("job");
  start.master_addr = body.at("master_addr");
  start.master_port = integer(body, "master_port");
}

void decode_body(const json& body, Failed& failed) {
  failed.blamed_ranks = blamed_ranks(body);
}

void decode_body(const json&, Welcome&) {}

void decode_body(const json&, Ping&) {}

void decode_body(const json& body, Signal& signal) {
  signal.number = integer(body, "number", 1, SIGRTMAX);
}

void decode_body(const json& body, Leave& leave) {
  leave.signal = integer(body, "signal", 1, SIGRTMAX);
}

void decode_body(const json& body, Result& result) {
  result.ranks = body.at("ranks").get<std::vector<launch::RankResult>>();
  result.problem = body.at("problem");
}

void decode_body(const json& body, Verdict& verdict) {
  verdict.restarts = body.at("restarts");
  verdict.exit_code = integer(body, "exit_code", 0, 255);
  verdict.signal = integer(body, "signal");
  verdict.report = body.at("report");
}

void decode_body(const json& body, Notice& notice) {
  notice.text = body.at("text");
}

template <std::size_t index = 0>
std::optional<Message> decode_as(std::string_view type, const json& body) {
  if constexpr (index < std::variant_size_v<Message>) {
    if (type != kNames[index]) return decode_as<index + 1>(type, body);
    std::variant_alternative_t<index, Message> message;
    decode_body(body, message);
    return message;
  }
  return std::nullopt;
}

}  // namespace

static_assert(kNames.size() == std::variant_size_v<Message>);

Verdict stopped_by(int signal) {
  const launch::JobResult result{.ranks = {}, .signal = signal};
  return {
      .exit_code = result.exit_code(), .signal = signal, .report = launch::failure_report(result)};
}

std::string encode(const Message& message) {
  json body = std::visit([](const auto& one) { return encode_body(one); }, message);
  body["type"] = kNames[message.index()];
  // What processes write need not be UTF-8.
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::optional<Message> decode(std::string_view text) {
  try {
    const json body = json::parse(text);
    return decode_as(body.at("type").get<std::string>(), body);
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

}  // namespace paceline::nodes
