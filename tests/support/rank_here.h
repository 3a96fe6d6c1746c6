#pragma once

#include <string>

#include "base/address.h"

namespace paceline::test {

// As `paceline run` names a rank of a job on this machine alone.
inline std::string rank_here(int rank) {
  return "rank " + std::to_string(rank) + " on " + base::host_name();
}

}  // namespace paceline::test
