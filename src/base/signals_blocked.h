#pragma once

#include <csignal>

namespace paceline::base {

// The signals that the calling thread blocks.
sigset_t signal_mask();

// Blocks signals on the calling thread while this object lives. A thread started meanwhile keeps
// them blocked: every thread of the library is started so, since a program's handlers should run on
// its own threads. Faults of the thread itself are not blocked, for handlers that report crashes.
class SignalsBlocked {
 public:
  SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked();

 private:
  sigset_t before_;
};

}  // namespace paceline::base
