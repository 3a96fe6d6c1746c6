#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "shm/membership/rank_set.h"
#include "shm/region.h"
#include "shm/sync/stop_detector.h"

namespace paceline::shm {

// The errors of a monitored barrier, in the words of PyTorch's. `missing`: global ranks.
//
// On rank 0, whose global rank is `host`: these ranks did not arrive.
[[noreturn]] void throw_not_arrived(int host, const RankSet& missing,
                                    std::chrono::milliseconds timeout, bool wait_all_ranks,
                                    std::uint32_t round);
// On another rank, `rank`: the barrier was not passed.
[[noreturn]] void throw_not_passed(int rank, int host, const RankSet& missing, std::uint32_t round);

// A barrier that names the ranks that did not arrive and leaves the group usable. Rank 0 waits for
// each other rank in turn and then releases all of them. Not thread-safe, and not concurrent with a
// call of the Group: every rank makes both in the same order.
class MonitoredBarrier {
 public:
  explicit MonitoredBarrier(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  // Throws a Timeout that names the first missing rank, or all with `wait_all_ranks`, in the words
  // of PyTorch's monitored_barrier. If a rank waits in a call of the Group instead, every rank
  // throws a Mismatch, and the group fails.
  void pass(std::chrono::milliseconds timeout, bool wait_all_ranks);

 private:
  class ArrivalWait;

  void collect(std::chrono::milliseconds timeout, bool wait_all_ranks, ArrivalWait& context);
  bool wait_for(const Word& word, int peer, base::Deadline& deadline,
                std::chrono::milliseconds timeout, ArrivalWait& context);
  bool has_arrived(int rank) const;
  void check_calls(bool late);

  std::shared_ptr<Region> region_;
  std::uint32_t round_ = 0;
  std::optional<base::Deadline> settling_;  // since a rank was found in another call
  StopDetector stops_;
};

}  // namespace paceline::shm
