#pragma once

#include <string>

#include "launch/job_result.h"

namespace paceline::launch {

// "exited with code 1", "killed by SIGKILL (often the kernel's out-of-memory killer)".
std::string describe_end(int status);

// A block of lines that says which rank failed first, how, and how the others ended; lines end with
// '\n'. One line if the job was ended by a signal; empty if nothing failed.
std::string failure_report(const JobResult& result);

}  // namespace paceline::launch
