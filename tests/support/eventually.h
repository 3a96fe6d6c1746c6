#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "base/deadline.h"

namespace paceline::test {

// Generous: it only bounds how long a broken test hangs.
constexpr std::chrono::seconds kTestTimeout{60};

// Waits until `condition` holds, by polling; false if it does not hold within kTestTimeout.
inline bool eventually(const std::function<bool()>& condition) {
  const auto deadline = base::Deadline::after(kTestTimeout);
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace paceline::test
