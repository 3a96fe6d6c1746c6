#include "parallel/parameter_server/shards.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace paceline::parameter_server {

std::vector<int> assign_to_servers(const std::vector<std::size_t>& bytes, int servers) {
  std::vector<std::size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](auto a, auto b) { return bytes[a] > bytes[b]; });
  // Bytes, then parameters: if sizes are equal, no server is left without one.
  std::vector<std::pair<std::size_t, std::size_t>> loads(static_cast<std::size_t>(servers));
  std::vector<int> result(bytes.size());
  for (const std::size_t parameter : order) {
    const auto least = std::ranges::min_element(loads);
    least->first += bytes[parameter];
    ++least->second;
    result[parameter] = static_cast<int>(least - loads.begin());
  }
  return result;
}

}  // namespace paceline::parameter_server
