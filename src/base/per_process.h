#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>

namespace paceline::base {

// An object with a mutex that this process has alone. A forked child begins with another one, since
// its parent's mutex may be held for ever: by a thread that the child does not have. Never
// destroyed, as threads and static objects that outlive main may use it. Make it static.
template <typename T>
class PerProcess {
 public:
  // `inherit(before, own)` gives a child what it may take of its parent's object.
  template <typename Inherit>
  T& get(Inherit inherit) {
    Owned* current = instance_;
    if (current->process == ::getpid()) return current->value;
    auto own = std::make_unique<Owned>();
    inherit(current->value, own->value);
    return instance_.compare_exchange_strong(current, own.get()) ? own.release()->value
                                                                 : current->value;
  }
  T& get() {
    return get([](T&, T&) {});
  }

 private:
  struct Owned {
    const pid_t process = ::getpid();
    T value{};
  };

  std::atomic<Owned*> instance_ = new Owned;
};

}  // namespace paceline::base
