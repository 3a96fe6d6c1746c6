#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

namespace paceline::bench {

// The mean of a call or step on one rank.
struct Sample {
  double wall_us = 0;
  double cpu_us = 0;
};

// What the messages of one call carried on one rank.
struct Payload {
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  std::int64_t messages_sent = 0;
  std::int64_t messages_received = 0;
};

// What the link of a node carried, headers included.
struct LinkBytes {
  std::int64_t sent = 0;
  std::int64_t received = 0;
};

// What was measured of one implementation, round by round.
struct Series {
  std::string implementation;
  std::string variant;          // "" if there is only one
  std::vector<double> wall_us;  // of one call or step, on the rank that took longest
  std::vector<double> cpu_us;   // of one call or step, all ranks together
  // Of one call, by rank; empty if they were not counted.
  std::vector<Payload> payload{};
  std::vector<LinkBytes> link{};
  double theory_us = 0;  // 0: none
};

// Implementations that took turns, so that their rounds are pairs.
struct Result {
  std::string benchmark;  // "all_reduce", "ddp"
  int ranks = 0;
  std::variant<std::int64_t, std::string> subject;  // bytes, or a model's name
  std::vector<Series> series;
};

// The fastest of kMpiLibraries, by the median; null if there is none.
const Series* best_mpi(const Result& result);

// A result on its way from rank 0 to the process that started the ranks: one line of JSON.
std::string to_line(const Result& result);
// Throws Error for a line that is not of to_line.
Result from_line(const std::string& line);

// One row for each series: {"benchmark", "implementation", "variant", "ranks", "bytes" or "model",
// "median_us", "p10_us", "p90_us", "cpu_us", "rounds", "speedup_over"}. cpu_us is the median of the
// rounds. speedup_over has an entry for each other implementation of the result, the fastest
// variant of it if there are several, and "best_mpi" for best_mpi() unless that is the row itself.
// What was counted is beside that, by rank: "payload", "link" and "theory_us".
nlohmann::ordered_json to_rows(const Result& result);

}  // namespace paceline::bench
