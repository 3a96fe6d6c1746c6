#include "shm/membership/at_exit.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>

#include "shm/sync/fork_generation.h"

namespace paceline::shm {

// Never destroyed: entries may be older than it is. A forked child begins a new one: its parent's
// entries do not concern it, and the parent's lock may be held by a thread that the child does not
// have.
class AtExit::Registry {
 public:
  static Registry& of_this_process() {
    static std::atomic<Registry*> current{nullptr};
    Registry* found = current.load(std::memory_order_acquire);
    if (found != nullptr && !found->process_.is_forked_child()) return *found;
    auto fresh = std::make_unique<Registry>();
    if (!current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
      return *found;  // another thread was first
    }
    static const int registered = std::atexit([] { of_this_process().run(); });
    static_cast<void>(registered);
    return *fresh.release();
  }

  void add(AtExit* entry) {
    const std::lock_guard lock(mutex_);
    entries_.insert(entry);
  }
  void remove(AtExit* entry) {
    const std::lock_guard lock(mutex_);
    entries_.erase(entry);
  }

 private:
  void run() {
    const std::lock_guard lock(mutex_);
    for (AtExit* const entry : entries_) entry->action_();
  }

  OwningProcess process_;
  std::mutex mutex_;
  std::set<AtExit*> entries_;
};

AtExit::AtExit(std::function<void()> action) : action_(std::move(action)) {
  Registry::of_this_process().add(this);
}

// In a forked child the registry is another one, in which this entry is not.
AtExit::~AtExit() {
  Registry::of_this_process().remove(this);
}

}  // namespace paceline::shm
