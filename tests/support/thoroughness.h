#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

namespace paceline::test {

// The factor by which a test should do more than in a quick run: PACELINE_TEST_THOROUGHNESS, for
// manual runs that take hours.
inline int thoroughness() {
  const char* const value = std::getenv("PACELINE_TEST_THOROUGHNESS");
  return value != nullptr ? std::max(1, std::stoi(value)) : 1;
}

// GCC defines macros, Clang has features.
#ifndef __has_feature
#define __has_feature(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace paceline::test
