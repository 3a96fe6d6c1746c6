#pragma once

#include <string>

#include "launch/job.h"

namespace paceline::launch {

// Starts the processes of `file` as children of this process, waits for all of them and returns how
// they ended. This process may be any: it may have threads and other children, and keeps its signal
// handlers and masks. So there is no supervisor: processes that the children leave behind live on.
//
// The children are in this process's group, write to its standard output and error, have an empty
// standard input, and get SIGKILL when the calling thread ends. Of `spec` it uses `processes`,
// `command` as the arguments, `environment`, `role`, `run_id` and the grace times. After a failure
// they are stopped as run_job stops its workers. Each inherits PACELINE_ERROR_FD, a file in memory
// for its error, which it has to make longer than nothing as soon as it does what it was started
// for. While SIGCHLD is ignored, it gets its default handling for the time of the call, since the
// kernel would drop the ends of children.
//
// Throws Error if the system refuses something, or if another wait of this process takes the end of
// a child. However the call is left, no child is left.
JobResult run_child_job(const JobSpec& spec, const std::string& file);

}  // namespace paceline::launch
