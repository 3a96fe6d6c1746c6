#pragma once

#include <cstdint>

namespace paceline::data {

// Throws UsageError, which names the data set, unless 0 <= index < size.
void check_index(const char* dataset, std::int64_t index, std::int64_t size);

}  // namespace paceline::data
