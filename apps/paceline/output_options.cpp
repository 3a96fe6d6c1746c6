#include "output_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <system_error>

#include <paceline/error.h>

#include "base/parse.h"

namespace paceline::app {
namespace {

using launch::Destination;

// torchrun's numbers of streams: 1 is stdout, 2 stderr, 3 both.
std::optional<unsigned> parse_streams(std::string_view text) {
  return base::parse_number(text, 0U, 3U);
}

[[noreturn]] void refuse_streams(const char* flag, const std::string& text) {
  throw UsageError(fmt::format(
      "{} {}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of them for "
      "each local rank, as in 0:1,1:3",
      flag, text));
}

// The streams of each rank that --redirects or --tee names. Ranks that there are not may be named,
// since all machines have the same command: they are added to `absent`.
std::vector<unsigned> parse_streams_of_ranks(const char* flag, const std::string& text,
                                             int processes, std::vector<std::string>& absent) {
  const auto all = parse_streams(text);
  std::vector<unsigned> streams(static_cast<std::size_t>(processes), all.value_or(0));
  if (all) return streams;
  for (const std::string_view one : base::split_at_commas(text)) {
    const std::size_t colon = one.find(':');
    if (colon == one.npos) refuse_streams(flag, text);
    const auto rank = base::parse_number(one.substr(0, colon), 0U, ~0U);
    const auto own = parse_streams(one.substr(colon + 1));
    if (!rank || !own) refuse_streams(flag, text);
    if (*rank < streams.size()) {
      streams[*rank] = *own;
    } else {
      absent.push_back(fmt::format("rank {} of {}", *rank, flag));
    }
  }
  return streams;
}

std::optional<std::set<int>> parse_shown_ranks(const std::string& text, int processes) {
  if (text.empty()) return std::nullopt;
  std::set<int> ranks;
  for (const std::string_view one : base::split_at_commas(text)) {
    const auto rank = base::parse_number(one, 0, processes - 1);
    if (!rank) {
      throw UsageError(
          fmt::format("--local-ranks-filter {}: '{}' is not a rank from 0 to {}; separate ranks by "
                      "commas",
                      text, one, processes - 1));
    }
    ranks.insert(*rank);
  }
  return ranks;
}

// Separated by commas; ",," is a comma. An empty text is in every line.
std::optional<std::vector<std::string>> parse_filters(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  std::vector<std::string> filters(1);
  for (std::size_t at = 0; at < text->size(); ++at) {
    const bool is_escaped = text->compare(at, 2, ",,") == 0;
    if ((*text)[at] == ',' && !is_escaped) {
      filters.emplace_back();
    } else {
      filters.back() += (*text)[at];
      at += is_escaped ? 1 : 0;
    }
  }
  return filters;
}

Destination destination(bool redirected, bool teed) {
  if (teed) return Destination::file_and_console;
  return redirected ? Destination::file : Destination::console;
}

std::filesystem::path temporary_directory() {
  std::error_code error;
  const auto path = std::filesystem::temp_directory_path(error);
  return error ? "/tmp" : path;
}

// As torchrun has it: /dev/null for the directory turns off what would be written there.
void add_logs(const RunFlags& flags, const launch::JobSpec& job, OutputOptions& options) {
  if (flags.log_dir == "/dev/null") return;
  const int processes = job.processes;
  const auto redirects =
      parse_streams_of_ranks("--redirects", flags.redirects, processes, options.without_effect);
  const auto tee = parse_streams_of_ranks("--tee", flags.tee, processes, options.without_effect);
  options.filters = {parse_filters(flags.stdout_filters), parse_filters(flags.stderr_filters)};
  bool has_files = options.filters[0] || options.filters[1];
  for (int rank = 0; rank < processes; ++rank) {
    const unsigned to_file = redirects[static_cast<std::size_t>(rank)];
    const unsigned to_both = tee[static_cast<std::size_t>(rank)];
    options.destinations.push_back({destination((to_file & 1) != 0, (to_both & 1) != 0),
                                    destination((to_file & 2) != 0, (to_both & 2) != 0)});
    has_files = has_files || (to_file | to_both) != 0;
  }
  if (!has_files) options.destinations.clear();
  std::string name = job.run_id + '_';
  std::ranges::replace(name, '/', '_');  // a directory of its own, whatever the id
  if (!flags.log_dir.empty()) {
    options.run_directory = std::filesystem::path(flags.log_dir) / name;
  } else if (has_files) {
    options.run_directory = temporary_directory() / ("paceline-logs-" + name);
  }
}

}  // namespace

OutputOptions make_output_options(const RunFlags& flags, const launch::JobSpec& job) {
  OutputOptions options;
  options.shown_ranks = parse_shown_ranks(flags.local_ranks, job.processes);
  options.prefix_template = flags.prefix_template;
  add_logs(flags, job, options);
  return options;
}

}  // namespace paceline::app
