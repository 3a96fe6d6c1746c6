#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace paceline::base {

struct ProcessStat {
  pid_t pid;
  char state;  // of its main thread: 'R', 'S', 'T', ...
  pid_t parent;
  pid_t group;
  unsigned flags;            // the kernel's PF_*
  unsigned long user_ticks;  // the processor time of all its threads, sysconf(_SC_CLK_TCK) a second
  unsigned long system_ticks;
};

// The content of the open /proc/PID/stat `fd`; empty if the process has ended meanwhile.
std::string read_stat(int fd);

// The first fields of /proc/PID/stat; empty if `stat` is malformed.
std::optional<ProcessStat> parse_stat(std::string_view stat);

// Those of a process now; empty if there is none, or if it is not visible.
std::optional<ProcessStat> stat_of(pid_t pid);

// Whether all threads of a process sleep or have ended.
bool is_asleep(pid_t pid);

// "its process 4711 is stopped", also by a debugger; empty if it is not, or not visible.
std::string describe_stop(pid_t pid);

}  // namespace paceline::base
