#pragma once

#include <cerrno>
#include <cstdio>
#include <string>

#include "base/errno_error.h"

namespace paceline::app {

// Writes to standard output at once. Throws Error if that fails.
inline void print(const std::string& text) {
  errno = 0;
  std::fputs(text.c_str(), stdout);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw base::errno_error("cannot write to standard output", errno != 0 ? errno : EIO);
  }
}

}  // namespace paceline::app
