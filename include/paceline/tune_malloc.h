#pragma once

#include <paceline/api.h>

namespace paceline {

// Has malloc keep what a training step frees for the next one. By default glibc gives large blocks
// back to the system at once, and each step pays for thousands of page faults anew. The process
// then stays as large as its largest step.
//
// Early in main, for programs that `paceline run` does not start; it does the same. Returns false,
// and does nothing, where malloc is not glibc's. Thread-safe.
PACELINE_API bool tune_malloc();

}  // namespace paceline
