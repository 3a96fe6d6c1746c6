#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "top/processes.h"

namespace paceline::top {

// What the ranks of a job have in common.
struct JobKey {
  std::string name;  // the launcher's; may be empty
  int port = 0;
  int size = 0;
  pid_t alone = 0;             // a world of one has no other process
  std::uint64_t identity = 0;  // of the world, if it has no name; 0 if not known

  bool operator==(const JobKey&) const = default;
};

JobKey key_of(const LiveProcess& process);

// Which job: that of a process, or of what it has started, or the one with that name, or the only
// one of this user.
struct Target {
  std::optional<pid_t> process;
  std::optional<std::string> job;
};

// Empty if the target may train, but has wrapped no model yet. Throws UsageError if there is no
// such process or job, if it does not train, or if there are several jobs; Error if this user may
// not look into it.
std::optional<JobKey> find_job(const Target& target);

// The ranks of a job on this machine, in ascending order.
std::vector<LiveProcess> ranks_of(const JobKey& job);

}  // namespace paceline::top
