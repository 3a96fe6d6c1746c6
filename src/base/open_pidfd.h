#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "base/unique_fd.h"

namespace paceline::base {

// Readable once the process has ended; empty if it is not visible from here, or has been reaped.
inline UniqueFd open_pidfd(pid_t pid) {
  if (pid <= 0) return {};
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace paceline::base
