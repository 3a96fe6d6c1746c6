#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/job.h"
#include "nodes/node_session.h"
#include "run_flags.h"

namespace paceline::app {

// What the flags say about a job on several machines; nullopt if it has one. Adds what was given
// and cannot apply to `without_effect`. Throws UsageError.
std::optional<nodes::SessionOptions> make_session_options(const RunFlags& flags,
                                                          const launch::JobSpec& job,
                                                          std::vector<std::string>& without_effect);

// Runs this machine's part of the job by `run`, which starts spec's processes and waits for them,
// and does so again if the job restarts. Returns how the job ended, on all nodes. Throws Error.
nodes::Verdict run_on_nodes(const nodes::SessionOptions& options, launch::JobSpec& spec,
                            const std::function<launch::JobResult()>& run,
                            const std::function<void(const std::string&)>& print);

}  // namespace paceline::app
