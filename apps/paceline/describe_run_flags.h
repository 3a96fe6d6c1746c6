#pragma once

#include <CLI/CLI.hpp>

#include "run_flags.h"

namespace paceline::app {

// Adds the flags of `paceline run` to `app`, which is to store them in `flags`.
void describe_run_flags(CLI::App& app, RunFlags& flags);

}  // namespace paceline::app
