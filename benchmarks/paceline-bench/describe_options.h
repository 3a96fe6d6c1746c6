#pragma once

#include <CLI/CLI.hpp>

#include "options.h"

namespace paceline::bench {

inline constexpr int kMinRounds = 5;  // the 90 % interval is from end to end then; fewer have none
inline constexpr int kQuickRounds = 30;

// The flags and subcommands that write into `options`, with their descriptions.
void describe_options(CLI::App& app, Options& options);

}  // namespace paceline::bench
