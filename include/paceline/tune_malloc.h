#pragma once

/// @file
/// Settings of malloc for training.

#include <paceline/api.h>

namespace paceline {

/// Makes malloc keep the memory that a training step frees, for the next step. By default glibc
/// returns large blocks to the system at once, so that each step pays for thousands of page faults
/// again. The process then stays as large as its largest step.
///
/// Call it early in main; `paceline run` has the same effect. Returns false, and does nothing, if
/// malloc is not glibc's. Safe to call from any thread.
PACELINE_API bool tune_malloc();

}  // namespace paceline
