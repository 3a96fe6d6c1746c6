#include "data/check_index.h"

#include <fmt/format.h>

#include <paceline/error.h>

namespace paceline::data {

void check_index(const char* dataset, std::int64_t index, std::int64_t size) {
  if (index >= 0 && index < size) return;
  throw UsageError(
      fmt::format("{} has {} samples, so there is no sample {}", dataset, size, index));
}

}  // namespace paceline::data
