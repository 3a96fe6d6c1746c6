#pragma once

#include <string>

#include "base/unique_fd.h"

namespace paceline::distributed {

// A Unix socket that listens at `path`, for this user only. It replaces a socket at which nobody
// listens any more, which a killed process leaves. Throws UsageError for a path that is too long,
// Error if something else is there or the system refuses.
base::UniqueFd listen_at_path(const std::string& path);

}  // namespace paceline::distributed
