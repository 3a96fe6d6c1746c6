#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace paceline::doctor {

enum class Status { ok, note, warning, error };

// One thing that was looked at, and what is to be said of it.
struct Check {
  std::string name{};  // in its group; for programs, so it stays the same: "host_name"
  Status status = Status::ok;
  std::string text{};    // may have several lines; empty if it is ok and there is nothing to add
  std::string advice{};  // what to do; set if the status is warning or error
  nlohmann::ordered_json values = nlohmann::ordered_json::object();  // the facts, in raw units
};

struct Group {
  std::string name{};  // stays the same too
  std::vector<Check> checks{};
};

inline Status worst(const std::vector<Group>& groups) {
  Status status = Status::ok;
  for (const Group& group : groups) {
    for (const Check& check : group.checks) status = std::max(status, check.status);
  }
  return status;
}

}  // namespace paceline::doctor
