#pragma once

#include <string>
#include <string_view>

#include "launch/job_result.h"

namespace paceline::launch {

// "rank 3", "ranks 4 to 7".
std::string name_ranks(int first, int count);

// "exited with code 1", "killed by SIGKILL (often the kernel's out-of-memory killer)".
std::string describe_end(int status);

// A block of lines that says how the rank `first` failed, and how the others ended; each line ends
// with '\n'.
std::string describe_failure(const JobResult& result, int first);

// Says how a process of a rank failed, and that it was started again as the replacement number
// `replacement` of `most` at most, or that the job goes on without it if that is 0; or the errno
// `error` for which it could not be started again.
std::string describe_loss(int rank, const RankResult& end, int replacement, int most, int error);

// Says how the rank that failed first did, as the launcher prints it. One line if the job was ended
// by a signal or preempted, and one if it ended without ranks that failed; empty if nothing did.
std::string failure_report(const JobResult& result);

}  // namespace paceline::launch
