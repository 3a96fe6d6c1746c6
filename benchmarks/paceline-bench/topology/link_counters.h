#pragma once

#include <optional>
#include <string>

#include "measure/result.h"

namespace paceline::bench {

// What the interface eth0 of this process's network namespace has carried since it exists, of a
// text as in /proc/net/dev; none if there is no such interface.
std::optional<LinkBytes> find_counters(const std::string& text);

// Of the running kernel. Throws Error in a process that is not in a Network.
LinkBytes read_counters();

}  // namespace paceline::bench
