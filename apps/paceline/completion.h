#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace paceline::app {

// A script for bash, zsh or tcsh that completes the long flags of `run`, the app of `paceline run`.
// Throws UsageError for another shell.
std::string completion_script(const CLI::App& run, const std::string& shell);

}  // namespace paceline::app
