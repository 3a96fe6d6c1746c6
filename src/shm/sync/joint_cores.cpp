#include "shm/sync/joint_cores.h"

#include <algorithm>
#include <bit>
#include <thread>

namespace paceline::shm {

void JointCores::add(const std::vector<int>& affinity, int quota) {
  for (const int core : affinity) {
    const auto bit = static_cast<std::size_t>(core) % kCores;
    mask_[bit / kBits].fetch_or(std::uint64_t{1} << (bit % kBits));
  }
  // If ranks come at the same time, the one that changes the mask last sees the bits of all.
  int cores = affinity.empty() ? static_cast<int>(std::thread::hardware_concurrency()) : 0;
  for (const auto& word : mask_) cores += std::popcount(word.load());
  if (quota > 0) cores = std::min(cores, quota);
  for (int seen = count_.load(); seen < cores && !count_.compare_exchange_weak(seen, cores);) {
  }
}

}  // namespace paceline::shm
