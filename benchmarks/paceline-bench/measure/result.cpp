#include "measure/result.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <map>

#include "measure/statistics.h"
#include "options.h"

namespace paceline::bench {

// For nlohmann's library, whose macro writes these for its unordered type only.
template <typename Json>
void to_json(Json& json, const Payload& one) {
  json = Json{{"bytes_sent", one.bytes_sent},
              {"bytes_received", one.bytes_received},
              {"messages_sent", one.messages_sent},
              {"messages_received", one.messages_received}};
}
template <typename Json>
void from_json(const Json& json, Payload& one) {
  one = {json.at("bytes_sent"), json.at("bytes_received"), json.at("messages_sent"),
         json.at("messages_received")};
}
template <typename Json>
void to_json(Json& json, const LinkBytes& one) {
  json = Json{{"sent", one.sent}, {"received", one.received}};
}
template <typename Json>
void from_json(const Json& json, LinkBytes& one) {
  one = {json.at("sent"), json.at("received")};
}

namespace {

using Json = nlohmann::ordered_json;

void put_subject(Json& json, const Result& result) {
  if (const auto* const bytes = std::get_if<std::int64_t>(&result.subject)) {
    json["bytes"] = *bytes;
  } else {
    json["model"] = std::get<std::string>(result.subject);
  }
}

void put_counts(Json& json, const Series& series) {
  if (!series.payload.empty()) json["payload"] = series.payload;
  if (!series.link.empty()) json["link"] = series.link;
  if (series.theory_us > 0) json["theory_us"] = series.theory_us;
}

std::map<std::string, const Series*> fastest_variants(const Result& result) {
  std::map<std::string, const Series*> fastest;
  for (const Series& one : result.series) {
    const Series*& best = fastest[one.implementation];
    if (best == nullptr || quantile(one.wall_us, 0.5) < quantile(best->wall_us, 0.5)) best = &one;
  }
  return fastest;
}

}  // namespace

const Series* best_mpi(const Result& result) {
  const Series* best = nullptr;
  for (const auto& [name, series] : fastest_variants(result)) {
    if (std::find(kMpiLibraries.begin(), kMpiLibraries.end(), name) == kMpiLibraries.end()) {
      continue;
    }
    if (best == nullptr || quantile(series->wall_us, 0.5) < quantile(best->wall_us, 0.5)) {
      best = series;
    }
  }
  return best;
}

std::string to_line(const Result& result) {
  Json json{{"benchmark", result.benchmark}, {"ranks", result.ranks}};
  put_subject(json, result);
  for (const Series& one : result.series) {
    json["series"].push_back({{"implementation", one.implementation},
                              {"variant", one.variant},
                              {"wall_us", one.wall_us},
                              {"cpu_us", one.cpu_us}});
    put_counts(json["series"].back(), one);
  }
  return json.dump() + '\n';
}

Result from_line(const std::string& line) {
  try {
    const Json json = Json::parse(line);
    Result result{json.at("benchmark"), json.at("ranks"), {}, {}};
    if (json.contains("bytes")) {
      result.subject = json["bytes"].get<std::int64_t>();
    } else {
      result.subject = json.at("model").get<std::string>();
    }
    for (const Json& one : json.at("series")) {
      result.series.push_back({one.at("implementation"), one.at("variant"), one.at("wall_us"),
                               one.at("cpu_us"), one.value("payload", std::vector<Payload>()),
                               one.value("link", std::vector<LinkBytes>()),
                               one.value("theory_us", 0.0)});
    }
    return result;
  } catch (const Json::exception& error) {
    throw Error(
        fmt::format("a rank wrote '{}' where a result was expected: {}", line, error.what()));
  }
}

Json to_rows(const Result& result) {
  auto peers = fastest_variants(result);
  if (const Series* const best = best_mpi(result)) peers["best_mpi"] = best;
  Json rows = Json::array();
  for (const Series& one : result.series) {
    Json row{{"benchmark", result.benchmark},
             {"implementation", one.implementation},
             {"variant", one.variant},
             {"ranks", result.ranks}};
    put_subject(row, result);
    row["median_us"] = quantile(one.wall_us, 0.5);
    row["p10_us"] = quantile(one.wall_us, 0.1);
    row["p90_us"] = quantile(one.wall_us, 0.9);
    row["cpu_us"] = quantile(one.cpu_us, 0.5);
    row["rounds"] = one.wall_us.size();
    put_counts(row, one);
    row["speedup_over"] = Json::object();
    for (const auto& [name, peer] : peers) {
      if (peer->implementation == one.implementation) continue;
      const Interval ratio = paired_speedup(one.wall_us, peer->wall_us);
      row["speedup_over"][name] = {
          {"median", ratio.median}, {"low", ratio.low}, {"high", ratio.high}};
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace paceline::bench
