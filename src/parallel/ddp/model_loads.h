#pragma once

#include <cstdint>

namespace paceline::ddp {

// How often this process has loaded a model. Thread-safe.
std::uint32_t model_loads();
void count_model_load();

}  // namespace paceline::ddp
