#pragma once

#include <paceline/distributed.h>

#include <map>
#include <string>

namespace paceline::bench {

// Groups of all ranks over other backends than the world's, by the backend.
using OtherGroups = std::map<std::string, ProcessGroup>;

}  // namespace paceline::bench
