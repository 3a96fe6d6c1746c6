#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "distributed/backend.h"
#include "shm/membership/failure.h"

namespace paceline::distributed {

// shm::MonitoredBarrier for ranks that do not share memory, over a store of their group. Not
// thread-safe: all ranks make the same calls in the same order.
class StoreBarrier {
 public:
  // Of the ranks that request a backend.
  explicit StoreBarrier(const BackendRequest& request);

  // As shm::MonitoredBarrier::pass, except that a rank which waits in another call is missing like
  // any other. `check_peers` throws if the group has failed; it is called fifty times a second.
  void pass(std::chrono::milliseconds timeout, bool wait_all_ranks,
            const std::function<void()>& check_peers);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::optional<int> store_server_;
  const int rank_;
  const int size_;
  const shm::GlobalRanks ranks_;
  std::uint64_t round_ = 0;
  std::uint64_t passed_ = 0;  // the last one that all ranks passed
};

}  // namespace paceline::distributed
