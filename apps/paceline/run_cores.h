#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "launch/core_binding.h"
#include "run_options.h"

namespace paceline::app {

// The cores and threads that the processes of a job get.
struct RunCores {
  // Holds the cores of --bind-to-cores while it lives.
  std::optional<launch::CoreBinding> held;
  std::string threads;  // "2 threads each"
  std::string binding;  // ", each on 2 cores of its own"; empty: they are not to be bound
};

// Sets spec.cpus as the flags ask for, and the threads of each process unless the user or a flag
// has. `cores`: how many there are. Throws UsageError.
RunCores choose_cores(RunOptions& options, int cores);

// "1 process", "2 processes".
std::string plural(int count, std::string_view one, std::string_view many);

}  // namespace paceline::app
