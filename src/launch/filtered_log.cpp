#include "launch/filtered_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "launch/log_directory.h"

namespace paceline::launch {

FilteredLog::FilteredLog(const std::filesystem::path& path, std::vector<std::string> texts,
                         std::vector<std::string> prefixes)
    : path_(path),
      texts_(std::move(texts)),
      prefixes_(std::move(prefixes)),
      splitters_(prefixes_.size()) {
  make_directories(path_.parent_path());
  file_.open(path_);
  if (!file_) throw base::errno_error(fmt::format("cannot make the log file {}", path_.string()));
}

void FilteredLog::write(int rank, std::string_view bytes) {
  const auto index = static_cast<std::size_t>(rank);
  splitters_[index].feed(bytes, [&](std::string_view line, char) { write_line(index, line); });
}

void FilteredLog::finish() {
  for (std::size_t rank = 0; rank < splitters_.size(); ++rank) {
    if (const auto rest = splitters_[rank].pending(); !rest.empty()) write_line(rank, rest);
  }
  if (!file_)
    throw Error(fmt::format("lines are missing in {}: it could not be written", path_.string()));
}

void FilteredLog::write_line(std::size_t rank, std::string_view line) {
  const bool is_wanted = std::ranges::any_of(
      texts_, [&](const std::string& text) { return line.find(text) != line.npos; });
  if (is_wanted) file_ << prefixes_[rank] << line << '\n' << std::flush;
}

}  // namespace paceline::launch
