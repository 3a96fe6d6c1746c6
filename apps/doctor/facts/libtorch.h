#pragma once

#include <vector>

#include "base/environment.h"
#include "facts/backends.h"
#include "facts/versions.h"

namespace paceline::doctor {

// What only a program with LibTorch and Paceline can tell.
VersionFacts read_versions();
std::vector<BackendFacts> read_backends();
// Throws UsageError if init_process_group() would, of the variables alone.
void check_rendezvous(const base::Environment& environment);

}  // namespace paceline::doctor
