#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::launch {

struct Process {
  pid_t pid;
  pid_t parent;
  pid_t group;
};

// The content of the open /proc/PID/stat `fd`; empty if the process has ended meanwhile.
std::string read_stat(int fd);

// The first fields of /proc/PID/stat; empty if `stat` is malformed.
std::optional<Process> parse_stat(std::string_view stat);

// The children of `root`, their children and so on, as /proc shows them now. Processes that are
// just being created may be missing: repeat until there are none.
std::vector<Process> descendants(pid_t root);

// Kills all descendants of this process, which has to adopt what they leave behind, and reaps them;
// for what the kernel cannot end, such as a process in a broken file system, it waits at most five
// seconds. The child `spared` is neither killed nor reaped.
void kill_descendants(pid_t spared = 0);

}  // namespace paceline::launch
