#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/job.h"
#include "run_flags.h"

namespace paceline::app {

// What becomes of the ranks' output, and of their files. Ranks are local ones.
struct OutputOptions {
  std::string prefix_template;               // of lines on the console; see make_line_prefixes
  std::optional<std::set<int>> shown_ranks;  // on the console; unset: all
  // Of each rank's stdout and stderr; empty: all goes to the console.
  std::vector<std::array<launch::Destination, 2>> destinations;
  // What a line of a stream that goes to file and console has to contain one of, to be in its
  // filtered log. Unset: there is none.
  std::array<std::optional<std::vector<std::string>>, 2> filters;
  // What the name of the run's directory starts with; empty: no files are kept.
  std::filesystem::path run_directory;
  std::vector<std::string> without_effect;  // "rank 4 of --tee", which this machine does not have

  bool is_teed(int rank, launch::Stream stream) const {
    return !destinations.empty() &&
           destinations[static_cast<std::size_t>(rank)][static_cast<std::size_t>(stream)] ==
               launch::Destination::file_and_console;
  }
};

// Throws UsageError.
OutputOptions make_output_options(const RunFlags& flags, const launch::JobSpec& job);

}  // namespace paceline::app
