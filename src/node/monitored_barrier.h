#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "node/region.h"

namespace paceline::node {

// A barrier that tells which ranks did not come and leaves the group usable: rank 0 waits for the
// others, one after the other, and lets them go. Not thread-safe.
class MonitoredBarrier {
 public:
  explicit MonitoredBarrier(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  // Throws Timeout that names the first rank rank 0 waited for in vain, with `wait_all_ranks` all
  // of those that are missing; the words are those of PyTorch's monitored_barrier.
  void pass(std::chrono::milliseconds timeout, bool wait_all_ranks);

 private:
  void collect(std::chrono::milliseconds timeout, bool wait_all_ranks);
  bool wait_for(const Word& word, int peer, const base::Deadline& deadline);

  std::shared_ptr<Region> region_;
  std::uint32_t round_ = 0;
};

}  // namespace paceline::node
