#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "top/live_reader.h"

namespace paceline::top {

// A process that trains.
struct LiveProcess {
  pid_t pid;
  base::UniqueFd pidfd;  // readable once it has ended
  std::shared_ptr<LiveReader> reader;
  LiveReader::Place place;

  bool has_ended() const;
  // Whether it is still the rank that it was.
  bool has_place() const;
};

// What the ranks of a job have in common.
struct JobKey {
  std::string name;  // the launcher's; may be empty
  int port = 0;
  int size = 0;
  pid_t alone = 0;  // a world of one has no other process

  bool operator==(const JobKey&) const = default;
};
JobKey key_of(const LiveProcess& process);

// Which job: that of a process, or of what it has started, or the one with that name, or the only
// one of this user.
struct Target {
  std::optional<pid_t> process;
  std::optional<std::string> job;
};

// The ranks of a job on this machine, in ascending order.
std::vector<LiveProcess> ranks_of(const JobKey& job);

// Empty if the target may train, but has wrapped no model yet. Throws UsageError if there is no
// such process or job, if it does not train, or if there are several jobs; Error if this user may
// not look into it.
std::optional<JobKey> find_job(const Target& target);

// Text of another process, without characters that a terminal would obey.
std::string printable(const std::string& text);

}  // namespace paceline::top
