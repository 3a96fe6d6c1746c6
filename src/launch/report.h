#pragma once

#include <string>

#include "launch/job_result.h"

namespace paceline::launch {

// "exited with code 1", "killed by SIGKILL (often the kernel's out-of-memory killer)".
std::string describe_end(int status);

// A block of lines that says how the rank `first` failed, and how the others ended; each line ends
// with '\n'.
std::string describe_failure(const JobResult& result, int first);

// The same about the rank that failed first, as the launcher prints it. One line if the job was
// ended by a signal; empty if nothing failed.
std::string failure_report(const JobResult& result);

}  // namespace paceline::launch
