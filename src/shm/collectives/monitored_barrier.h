#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "shm/region.h"

namespace paceline::shm {

// A barrier that tells which ranks did not come and leaves the group usable: rank 0 waits for the
// others, one after the other, and lets them go. Not thread-safe, and not beside a call of the
// Group: it comes before or after each of them, on every rank alike.
class MonitoredBarrier {
 public:
  explicit MonitoredBarrier(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  // Throws Timeout that names the first rank rank 0 waited for in vain, with `wait_all_ranks` all
  // of those that are missing; the words are those of PyTorch's monitored_barrier. If a rank waits
  // in a call of the Group meanwhile, that is a Mismatch, there as well, and fails the group.
  void pass(std::chrono::milliseconds timeout, bool wait_all_ranks);

 private:
  void collect(std::chrono::milliseconds timeout, bool wait_all_ranks);
  bool wait_for(const Word& word, int peer, const base::Deadline& deadline);
  void check_calls(bool late);

  std::shared_ptr<Region> region_;
  std::uint32_t round_ = 0;
  std::optional<base::Deadline> settling_;  // from when ranks were found in another call
};

}  // namespace paceline::shm
