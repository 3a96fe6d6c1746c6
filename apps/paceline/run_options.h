#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/cpus.h"
#include "launch/job.h"
#include "nodes/node_session.h"
#include "output_options.h"

namespace paceline::app {

struct RunOptions {
  launch::JobSpec job;
  bool bind_to_cores = false;
  bool deterministic = false;  // job.environment has what it sets
  std::optional<launch::NumaBinding> numa_binding{};
  std::optional<nodes::SessionOptions> nodes{};  // of a job on several
  OutputOptions output{};
  std::vector<int> signals{};  // to be passed on
  std::string notice{};        // about flags that cannot apply: a line, or empty
};

// Translates the arguments after `paceline run`. Empty if they ask for help or for a completion
// script; `help` is that text then. Throws UsageError.
std::optional<RunOptions> parse_run_options(const std::vector<std::string>& arguments, int cores,
                                            std::string& help);

}  // namespace paceline::app
