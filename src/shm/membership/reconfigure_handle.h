#pragma once

#include <string>
#include <string_view>

#include "shm/membership/endpoint.h"

namespace paceline::shm {

// c10d's opaque handle of a rank: where it listens for its next group.
struct ReconfigureHandle {
  int rank = 0;  // its present one
  Endpoint endpoint;

  // Printable ASCII.
  std::string encode() const;
  // Throws UsageError, with the text, unless it is an encoded handle.
  static ReconfigureHandle decode(std::string_view text);
};

}  // namespace paceline::shm
