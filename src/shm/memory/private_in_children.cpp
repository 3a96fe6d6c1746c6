#include "shm/memory/private_in_children.h"

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <memory>

namespace paceline::shm {

// One of a list without a lock, which another thread of the parent could hold for ever in the
// child, and for which a fork would have to wait. Entries are reused and never freed.
//
// A fork copies memory while the kernel lets no thread map or unmap. `live` is set after the
// mapping was made and cleared before it ends, so the child has what it finds live. The alignment
// keeps an entry in one page, which is copied as it is at one moment.
class alignas(64) PrivateInChildren::Entry {
 public:
  static Entry* claim() {
    static const int registered = ::pthread_atfork(nullptr, nullptr, make_private);
    static_cast<void>(registered);
    for (Entry* entry = first.load(std::memory_order_acquire); entry; entry = entry->next_) {
      if (!entry->used_.exchange(true, std::memory_order_acquire)) return entry;
    }
    Entry* const entry = new Entry;
    entry->next_ = first.load(std::memory_order_relaxed);
    while (!first.compare_exchange_weak(entry->next_, entry, std::memory_order_release)) {
    }
    return entry;
  }

  void begin(std::byte* data, std::size_t size, int file) {
    data_ = data;
    size_ = size;
    file_ = file;
    live_.store(true, std::memory_order_release);
  }
  void end() {
    live_.store(false, std::memory_order_release);
    used_.store(false, std::memory_order_release);
  }

 private:
  // In a child, with system calls only.
  static void make_private() {
    for (Entry* entry = first.load(std::memory_order_acquire); entry; entry = entry->next_) {
      // A child of this child copies what is private now.
      if (!entry->live_.exchange(false, std::memory_order_acquire)) continue;
      // A failure may have removed the mapping: then it is shared again, as before.
      if (!entry->map(MAP_PRIVATE)) entry->map(MAP_SHARED);
    }
  }

  bool map(int kind) const {
    if (::mmap(data_, size_, PROT_READ | PROT_WRITE, kind | MAP_FIXED | MAP_NORESERVE, file_, 0) ==
        MAP_FAILED) {
      return false;
    }
    ::madvise(data_, size_, MADV_DONTDUMP);
    return true;
  }

  static inline std::atomic<Entry*> first = nullptr;

  Entry* next_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int file_ = -1;
  std::atomic<bool> used_ = true;
  std::atomic<bool> live_ = false;
};

PrivateInChildren::PrivateInChildren(std::byte* data, std::size_t size, int file)
    : entry_(Entry::claim()) {
  entry_->begin(data, size, file);
}

PrivateInChildren::~PrivateInChildren() {
  entry_->end();
}

}  // namespace paceline::shm
