#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/launcher.h"

namespace paceline::base {

// Reads variables; an empty one counts as unset. Throws UsageError naming the variable, its value
// and what is allowed.
class EnvironmentReader {
 public:
  explicit EnvironmentReader(const Getenv& getenv) : getenv_(getenv) {}

  std::optional<std::string> text(const char* name) const;
  std::optional<int> integer(const char* name, int low,
                             int high = std::numeric_limits<int>::max()) const;
  // From 0 on, comma separated.
  std::vector<std::int64_t> integers(
      const char* name, std::int64_t high = std::numeric_limits<std::int64_t>::max()) const;

 private:
  const Getenv& getenv_;
};

// Throws UsageError if both values are known and the first is not less.
void check_below(const char* name, std::optional<int> value, const char* bound_name,
                 std::optional<int> bound);

}  // namespace paceline::base
