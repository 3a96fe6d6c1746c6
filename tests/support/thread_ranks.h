#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "shm/region.h"

namespace paceline::test {

// The world sizes of tests over several ranks; most of them exceed the number of cores.
inline constexpr int kWorldSizes[] = {1, 2, 3, 4, 5, 8};

inline shm::RegionOptions small_region(
    std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  return {.name = "test",
          .timeout = timeout,
          .staging_bytes = std::size_t{512} << 10,
          .arena_bytes = std::size_t{64} << 20};
}

// What ranks that are threads of this process share: one mapping, so that ThreadSanitizer sees
// every access.
class ThreadRegions {
 public:
  explicit ThreadRegions(int size, const shm::RegionOptions& options = small_region())
      : size_(size), options_(options) {
    mapping_ = std::make_shared<shm::Mapping>(
        shm::Mapping::create_memory(shm::Region::layout(size, options).total()));
  }

  // A rank's region, with the cores of the calling thread.
  std::shared_ptr<shm::Region> enter(int rank) const {
    shm::Membership unwatched;
    unwatched.peers.resize(static_cast<std::size_t>(size_));
    for (shm::Peer& peer : unwatched.peers) peer.pid = ::getpid();
    return std::make_shared<shm::Region>(mapping_, std::move(unwatched), rank, size_, options_);
  }

  // The same, as if this process were bound to `core`.
  std::shared_ptr<shm::Region> enter_on(int core, int rank) const {
    std::shared_ptr<shm::Region> region;
    std::thread([&] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(core, &set);
      EXPECT_EQ(::sched_setaffinity(0, sizeof(set), &set), 0);
      region = enter(rank);
    }).join();
    return region;
  }

 private:
  int size_;
  shm::RegionOptions options_;
  std::shared_ptr<shm::Mapping> mapping_;
};

inline std::vector<std::shared_ptr<shm::Region>> make_thread_regions(
    int size, const shm::RegionOptions& options = small_region()) {
  const ThreadRegions memory(size, options);
  std::vector<std::shared_ptr<shm::Region>> regions;
  for (int rank = 0; rank < size; ++rank) regions.push_back(memory.enter(rank));
  return regions;
}

// Runs `body` as one rank for each region in threads of this process, and rethrows the exception of
// the lowest rank that threw.
inline void run_thread_ranks(std::vector<std::shared_ptr<shm::Region>> regions,
                             const std::function<void(std::shared_ptr<shm::Region>)>& body) {
  std::vector<std::exception_ptr> errors(regions.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(std::move(regions[rank]));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

inline void run_thread_ranks(int size,
                             const std::function<void(std::shared_ptr<shm::Region>)>& body,
                             const shm::RegionOptions& options = small_region()) {
  run_thread_ranks(make_thread_regions(size, options), body);
}

}  // namespace paceline::test
