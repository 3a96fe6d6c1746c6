#include "topology/link_counters.h"

#include <fstream>
#include <iterator>
#include <sstream>

#include <paceline/error.h>

namespace paceline::bench {

std::optional<LinkBytes> find_counters(const std::string& text) {
  constexpr int kFieldsOfReceiving = 8;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(':');
    if (colon == line.npos || line.substr(0, colon).find("eth0") == line.npos) continue;
    std::istringstream fields(line.substr(colon + 1));
    LinkBytes bytes;
    std::int64_t other = 0;
    fields >> bytes.received;
    for (int i = 1; i < kFieldsOfReceiving; ++i) fields >> other;
    if (fields >> bytes.sent) return bytes;
  }
  return std::nullopt;
}

LinkBytes read_counters() {
  std::ifstream file("/proc/thread-self/net/dev");
  const auto found = find_counters({std::istreambuf_iterator<char>(file), {}});
  if (!found) throw Error("/proc/thread-self/net/dev has no interface eth0: this is not a node");
  return *found;
}

}  // namespace paceline::bench
