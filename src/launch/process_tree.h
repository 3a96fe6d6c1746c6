#pragma once

#include <sys/types.h>

#include <vector>

#include "base/process_stat.h"

namespace paceline::launch {

using Process = base::ProcessStat;

// Whether /proc is of this process's PID namespace. If not, its numbers mean other processes here.
bool sees_processes();

// The children of `root`, their children and so on, as /proc shows them now; none without
// sees_processes(). Processes that are just being created may be missing: repeat until there are
// none.
std::vector<Process> descendants(pid_t root);

// Kills all descendants of this process, which has to adopt what they leave behind, and reaps them;
// for what the kernel cannot end, such as a process in a broken file system, it waits at most five
// seconds. The child `spared` is neither killed nor reaped.
void kill_descendants(pid_t spared = 0);

}  // namespace paceline::launch
