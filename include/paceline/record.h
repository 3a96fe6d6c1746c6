#pragma once

/// @file
/// Runs a rank's main function and reports its exceptions.

#include <paceline/api.h>

#include <functional>
#include <type_traits>

namespace paceline {

namespace detail {
PACELINE_API int record(const std::function<int()>& body);
}

/// Runs `body` as a rank's main function and returns the process's exit code: what `body` returns
/// if it returns an int, 0 if it returns nothing, 1 if it throws.
///
/// An exception is reported on stderr, to the other ranks, and to the launcher. The launcher gets
/// it in the file that TORCHELASTIC_ERROR_FILE names, in torchrun's format, or in memory if that
/// file cannot be written. A later call of `record` in the same process removes that file. A child
/// that `body` forks leaves none, as the file is for the rank. While `body` runs, the library's
/// messages of level info and above go to stderr; what stderr does not take at once, as a full pipe
/// that nobody reads, is dropped. stdout becomes line-buffered, and both streams are flushed at the
/// end.
///
/// In a process that spawn started, `body` ends with the function of spawn, and the exit code is 0,
/// or 1 if the function threw. A later call of `record` there returns the same code and runs
/// nothing.
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
