#pragma once

#include <algorithm>
#include <cstdlib>

namespace paceline::test {

// How many times as much a test should do as in a quick run: what PACELINE_TEST_THOROUGHNESS says,
// for runs by hand that take hours.
inline int thoroughness() {
  const char* const value = std::getenv("PACELINE_TEST_THOROUGHNESS");
  return value != nullptr ? std::max(1, std::atoi(value)) : 1;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace paceline::test
