#pragma once

#include <nlohmann/json.hpp>

namespace paceline::bench {

// What the figures depend on: the processor, the cores this process may use, memory, kernel, the
// load before the run, and the versions of LibTorch and Paceline.
nlohmann::ordered_json describe_machine();

}  // namespace paceline::bench
