#pragma once

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

// The regions of `size` ranks that are threads of this process, over one mapping, so that
// ThreadSanitizer sees every access.
inline std::vector<std::shared_ptr<shm::Region>> make_thread_regions(
    int size, const shm::RegionOptions& options) {
  const std::size_t bytes = shm::Region::layout(size, options).total();
  auto mapping = std::make_shared<shm::Mapping>(shm::Mapping::create_memory(bytes), bytes);
  std::vector<std::shared_ptr<shm::Region>> regions;
  for (int rank = 0; rank < size; ++rank) {
    shm::Membership unwatched;
    unwatched.peers.resize(static_cast<std::size_t>(size));
    regions.push_back(
        std::make_shared<shm::Region>(mapping, std::move(unwatched), rank, size, options));
  }
  return regions;
}

// Runs `body` as ranks 0 to size-1 in threads of this process that share one mapping, and rethrows
// the exception of the lowest rank that threw.
inline void run_thread_ranks(int size,
                             const std::function<void(std::shared_ptr<shm::Region>)>& body,
                             const shm::RegionOptions& options = small_region()) {
  auto regions = make_thread_regions(size, options);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
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

}  // namespace paceline::test
