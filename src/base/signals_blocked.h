#pragma once

#include <csignal>

namespace paceline::base {

// Blocks signals on the calling thread as long as it exists. A thread that is started meanwhile
// keeps them blocked: every thread of the library is, since a program's handlers are to run on its
// own threads. Faults of the thread itself stay as they are, for handlers that report crashes.
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
