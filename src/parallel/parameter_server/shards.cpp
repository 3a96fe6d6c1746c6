#include "parallel/parameter_server/shards.h"

#include <algorithm>
#include <numeric>

namespace paceline::parameter_server {

std::vector<int> assign_to_servers(const std::vector<std::size_t>& bytes, int servers) {
  std::vector<std::size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](auto a, auto b) { return bytes[a] > bytes[b]; });
  // By count if the sizes are equal, so that no server is left without a parameter.
  struct Load {
    std::size_t bytes = 0;
    std::size_t parameters = 0;
    auto operator<=>(const Load&) const = default;
  };
  std::vector<Load> loads(static_cast<std::size_t>(servers));
  std::vector<int> result(bytes.size());
  for (const std::size_t parameter : order) {
    const auto least = std::ranges::min_element(loads);
    least->bytes += bytes[parameter];
    ++least->parameters;
    result[parameter] = static_cast<int>(least - loads.begin());
  }
  return result;
}

}  // namespace paceline::parameter_server
