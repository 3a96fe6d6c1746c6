#pragma once

#include <functional>

namespace paceline::shm {

// While it lives, `action` runs if the process ends in good order; so a process leaves its groups
// even if nobody destroys them. The action must not throw. In a forked child nothing runs and the
// destructor does nothing.
class AtExit {
 public:
  explicit AtExit(std::function<void()> action);
  AtExit(const AtExit&) = delete;
  AtExit& operator=(const AtExit&) = delete;
  ~AtExit();

 private:
  class Registry;

  std::function<void()> action_;
};

}  // namespace paceline::shm
