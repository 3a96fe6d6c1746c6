#pragma once

#include <string>

#include <paceline/error.h>

namespace paceline::base {

// An Error that says what failed and the system's reason: "cannot map 4096 bytes: Cannot allocate
// memory (ENOMEM)". Reads errno.
Error errno_error(const std::string& what);
Error errno_error(const std::string& what, int code);

}  // namespace paceline::base
