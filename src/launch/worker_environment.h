#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "launch/job.h"

namespace paceline::launch {

// What the ranks of a job have in common, chosen at its start.
struct JobIdentity {
  std::string run_id;
  int master_port;
  std::filesystem::path directory{};  // of the error files; empty: there are none
};

std::filesystem::path error_file_path(const JobIdentity& job, int local_rank);

// The environment of one rank, "NAME=value" each, sorted: `inherited` (as environ), without what an
// outer launcher set for this process, then spec.environment, then the launcher's own variables.
// `store_fd`: -1 if there is none.
std::vector<std::string> worker_environment(const JobSpec& spec, const JobIdentity& job,
                                            int local_rank,
                                            const std::vector<int>& bootstrap_sockets, int store_fd,
                                            const char* const* inherited);

}  // namespace paceline::launch
