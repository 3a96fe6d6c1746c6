#pragma once

#include <functional>

namespace paceline::shm {

// While it lives, `action` runs if the process exits normally, so that a process leaves groups that
// were not destroyed. The action must not throw. In a forked child nothing runs and the destructor
// does nothing.
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
