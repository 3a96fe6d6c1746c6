#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/signals_blocked.h"

namespace paceline::base {

[[noreturn]] void throw_no_thread(const std::system_error& error);

// Starts a thread on which signals are blocked. Throws Error that names the limits if the system
// has no thread to give.
template <typename Thread = std::thread, typename Body>
Thread start_thread(Body body) {
  const SignalsBlocked blocked;
  try {
    return Thread(std::move(body));
  } catch (const std::system_error& error) {
    throw_no_thread(error);
  }
}

}  // namespace paceline::base
