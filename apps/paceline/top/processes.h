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
  // Whether it belongs to the user who runs this process.
  bool is_this_users() const;
};

// Empty if it shows nothing. Throws Error if this user may not look, or if it runs another version.
std::optional<LiveProcess> look_into(pid_t process);

// Leaves out processes that this user may not look into, and processes of other versions.
std::vector<LiveProcess> all_live_processes();

// Whether it is a rank, or may become one or start ones.
bool may_train(pid_t process);

// Whether a process that this user may look into has the variables that a launcher of this job
// sets.
bool is_started(const std::string& job);

// The process that a thread belongs to; empty if there is neither.
std::optional<pid_t> process_of(pid_t thread);

// The name of its program.
std::string program_of(pid_t process);

}  // namespace paceline::top
