#pragma once

#include <functional>
#include <type_traits>

#include <paceline/api.h>

namespace paceline {

namespace detail {
PACELINE_API int record(const std::function<int()>& body);
}

// Runs `body` as the main of a rank and gives the process's exit code: what body returns if it
// returns an int, 0 if it returns nothing, 1 if an exception leaves it. Such an exception is
// reported to the launcher (in the file that TORCHELASTIC_ERROR_FILE names, in torchrun's format),
// on stderr, and to the other ranks of the job. Called again, it removes that file: the rank goes
// on. While body runs, the library's messages of level info and above go to stderr. Makes stdout
// line-buffered, and flushes both at the end.
template <typename Body>
[[nodiscard]] int record(Body&& body) {
  if constexpr (std::is_void_v<std::invoke_result_t<Body>>) {
    return detail::record([&] {
      body();
      return 0;
    });
  } else {
    return detail::record([&] { return static_cast<int>(body()); });
  }
}

}  // namespace paceline
