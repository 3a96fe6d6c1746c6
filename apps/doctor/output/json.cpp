#include "output/json.h"

#include <nlohmann/json.hpp>

#include <paceline/version.h>

namespace paceline::doctor {

NLOHMANN_JSON_SERIALIZE_ENUM(Status, {{Status::ok, "ok"},
                                      {Status::note, "note"},
                                      {Status::warning, "warning"},
                                      {Status::error, "error"}})

std::string json_of(const std::vector<Group>& groups) {
  using Json = nlohmann::ordered_json;
  Json document{{"paceline", kVersion}, {"status", worst(groups)}, {"groups", Json::array()}};
  for (const Group& group : groups) {
    Json checks = Json::array();
    for (const Check& check : group.checks) {
      checks.push_back({{"id", group.name + "." + check.name},
                        {"status", check.status},
                        {"text", check.text},
                        {"advice", check.advice},
                        {"values", check.values}});
    }
    document["groups"].push_back({{"id", group.name}, {"checks", std::move(checks)}});
  }
  // Variables and host names may have bytes that are not UTF-8.
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace paceline::doctor
