#include "backends/paceline/gradient_memory.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

namespace paceline::backends {

class GradientMemory::Source {
 public:
  Source(std::shared_ptr<shm::Region> region, const std::vector<std::size_t>& sizes)
      : region_(std::move(region)) {
    for (const std::size_t size : sizes) ++demand_[size].most;
  }

  bool serves(std::size_t bytes) const {
    const auto found = demand_.find(bytes);
    return found != demand_.end() && found->second.live < found->second.most;
  }
  void* allocate(std::size_t bytes) {
    void* const memory = region_->memory().allocate(bytes);
    if (memory != nullptr) ++demand_[bytes].live;
    return memory;
  }
  void free(void* memory, std::size_t bytes) {
    --demand_[bytes].live;
    region_->memory().free(memory);
  }

  std::atomic<bool> open = true;

 private:
  static constexpr std::size_t kOthers = 8;
  struct Demand {
    std::size_t most = kOthers;
    std::size_t live = 0;
  };
  std::shared_ptr<shm::Region> region_;
  std::map<std::size_t, Demand> demand_;
};

namespace {

using Source = GradientMemory::Source;

// The most recent first.
thread_local std::vector<std::weak_ptr<Source>> preferred;

// Lives as long as the process, since LibTorch keeps it.
class GradientAllocator final : public c10::Allocator {
 public:
  static GradientAllocator& instance() {
    static auto* const one = new GradientAllocator;
    return *one;
  }

  // Replaces the current allocator for blocks of at least `smallest` bytes. Its priority can only
  // be found by trying.
  void install(std::size_t smallest) {
    const std::lock_guard lock(mutex_);
    smallest_ = std::min<std::size_t>(smallest_, smallest);
    if (before_ != nullptr) return;
    before_ = c10::GetCPUAllocator();
    // Other threads may allocate meanwhile. LibTorch stores and loads the pointer without atomics,
    // so the object must be complete before.
    std::atomic_thread_fence(std::memory_order_release);
    constexpr int kHighest = std::numeric_limits<std::uint8_t>::max();
    for (int priority = 0; priority <= kHighest && c10::GetCPUAllocator() != this; ++priority) {
      c10::SetCPUAllocator(this, static_cast<std::uint8_t>(priority));
    }
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= smallest_ && !preferred.empty() &&
        torch::autograd::get_current_graph_task_id() != -1) {
      // raw_allocate wants a context that is the address.
      if (void* const memory = serve(bytes)) return {memory, memory, &release, at::kCPU};
    }
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return before_->raw_deleter() == nullptr ? nullptr : &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void close(Source& source) {
    const std::lock_guard lock(mutex_);
    source.open = false;
  }

 private:
  struct Block {
    std::shared_ptr<Source> source;
    std::size_t bytes;
  };

  void* serve(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (const auto& candidate : preferred) {
      const auto source = candidate.lock();
      if (!source || !source->open || !source->serves(bytes)) continue;
      void* const memory = source->allocate(bytes);
      if (memory == nullptr) continue;
      blocks_.emplace(memory, Block{source, bytes});
      return memory;
    }
    return nullptr;
  }

  // Called for our blocks, and through raw_deallocate for any block.
  static void release(void* memory) {
    GradientAllocator& self = instance();
    std::shared_ptr<Source> last;  // destroyed after the lock is released
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.blocks_.find(memory);
      if (found != self.blocks_.end()) {
        last = std::move(found->second.source);
        last->free(memory, found->second.bytes);
        self.blocks_.erase(found);
        return;
      }
    }
    self.before_->raw_deallocate(memory);
  }

  std::mutex mutex_;
  c10::Allocator* before_ = nullptr;
  std::atomic<std::size_t> smallest_ = std::numeric_limits<std::size_t>::max();
  std::unordered_map<void*, Block> blocks_;
};

}  // namespace

GradientMemory::GradientMemory(std::shared_ptr<shm::Region> region,
                               const std::vector<std::size_t>& sizes) {
  if (sizes.empty()) return;
  source_ = std::make_shared<Source>(std::move(region), sizes);
  GradientAllocator::instance().install(*std::ranges::min_element(sizes));
}

GradientMemory::~GradientMemory() {
  if (source_) GradientAllocator::instance().close(*source_);
}

void GradientMemory::prefer() {
  if (!source_ || (!preferred.empty() && preferred.front().lock() == source_)) return;
  std::erase_if(preferred, [&](const auto& one) {
    const auto source = one.lock();
    return !source || !source->open || source == source_;
  });
  preferred.insert(preferred.begin(), source_);
}

}  // namespace paceline::backends
