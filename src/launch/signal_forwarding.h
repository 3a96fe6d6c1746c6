#pragma once

#include <csignal>
#include <span>

#include "base/unique_fd.h"

namespace paceline::launch {

// While it lives, the given signals and SIGTSTP are blocked on the thread that made it and can be
// read from fd() instead; signals that the process ignores stay ignored. Other threads have to
// block them.
class SignalForwarding {
 public:
  // Throws Error.
  explicit SignalForwarding(std::span<const int> signals);
  SignalForwarding(const SignalForwarding&) = delete;
  SignalForwarding& operator=(const SignalForwarding&) = delete;
  ~SignalForwarding();

  int fd() const { return fd_.get(); }
  // The next signal, 0 if there is none.
  int next();
  // Unblocks the signals. A signal that has come and was not read acts now.
  void unblock();
  // The thread's mask before.
  const sigset_t& original_mask() const { return original_mask_; }

 private:
  sigset_t original_mask_{};
  base::UniqueFd fd_;
};

}  // namespace paceline::launch
