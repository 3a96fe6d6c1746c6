#include "launch/core_binding.h"

#include "launch/cpus.h"

namespace paceline::launch {

std::optional<CoreBinding> bind_to_cores(const std::vector<int>& available, int ranks) {
  // A job that starts at the same time may take one that was free just now.
  for (int attempt = 0; attempt < 10; ++attempt) {
    auto assigned = assign_cpus(read_cpus(find_free(available)), ranks);
    if (assigned.empty()) return std::nullopt;
    std::vector<int> all;
    for (const auto& own : assigned) all.insert(all.end(), own.begin(), own.end());
    if (auto held = HeldCpus::try_hold(all))
      return CoreBinding{std::move(assigned), std::move(*held)};
  }
  return std::nullopt;
}

}  // namespace paceline::launch
