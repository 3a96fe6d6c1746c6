#pragma once

#include <vector>

#include "check.h"
#include "facts/backends.h"
#include "facts/cores.h"
#include "facts/kernel.h"
#include "facts/limits.h"
#include "facts/memory.h"
#include "facts/network.h"
#include "facts/variables.h"
#include "facts/versions.h"
#include "self_test/job.h"

// What the facts mean. A check that does not apply is left out.
namespace paceline::doctor {

Group check_versions(const VersionFacts& facts);
Group check_backends(const std::vector<BackendFacts>& facts);
Group check_cores(const CoreFacts& facts);
// `ranks`: for as many there should be room.
Group check_memory(const MemoryFacts& facts, const Limits& limits, int ranks);
Group check_descriptors(const Limits& limits, int ranks);
Group check_kernel(const KernelFacts& facts);
Group check_network(const NetworkFacts& facts);
Group check_variables(const VariableFacts& facts);
Check check_self_test(const SelfTest& result);

// How many descriptors `paceline run` opens for `ranks` ranks. Each of them needs fewer.
int needed_descriptors(int ranks);

}  // namespace paceline::doctor
