#include "shm/sync/fork_generation.h"

#include <pthread.h>

#include <atomic>

namespace paceline::shm {
namespace {

std::atomic<unsigned>& forks() {
  static std::atomic<unsigned> count{0};
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return count;
}

}  // namespace

unsigned fork_generation() {
  return forks().load(std::memory_order_relaxed);
}

}  // namespace paceline::shm
