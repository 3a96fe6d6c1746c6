#include "peak_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace paceline::bench {
namespace {

class ThreadMemory : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* block, std::int64_t size, std::size_t /*allocated*/,
                         std::size_t /*reserved*/, c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::scoped_lock lock(mutex_);
    Use& use = uses_[std::this_thread::get_id()];
    if (size > 0) {
      use.blocks[block] = size;
      use.now += size;
      use.peak = std::max(use.peak, use.now);
    } else if (const auto found = use.blocks.find(block); found != use.blocks.end()) {
      use.now -= found->second;
      use.blocks.erase(found);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::vector<std::int64_t> peaks() const {
    std::vector<std::int64_t> peaks;
    for (const auto& [thread, use] : uses_) peaks.push_back(use.peak);
    std::ranges::sort(peaks, std::greater());
    return peaks;
  }

 private:
  struct Use {
    std::map<void*, std::int64_t> blocks;
    std::int64_t now = 0;
    std::int64_t peak = 0;
  };

  std::mutex mutex_;
  std::map<std::thread::id, Use> uses_;
};

}  // namespace

std::vector<std::int64_t> peak_memory_by_thread(const std::function<void()>& body) {
  const auto memory = std::make_shared<ThreadMemory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
  body();
  return memory->peaks();
}

}  // namespace paceline::bench
