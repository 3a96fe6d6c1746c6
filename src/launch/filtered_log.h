#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "launch/line_splitter.h"

namespace paceline::launch {

// A file with the lines of all ranks that contain one of several texts, each with its rank's
// prefix.
class FilteredLog {
 public:
  // Makes the file, and its directory if that is missing. Throws Error.
  FilteredLog(const std::filesystem::path& path, std::vector<std::string> texts,
              std::vector<std::string> prefixes);

  // Pieces of a rank's output, which need not end at the end of a line. The file has a line once
  // it is complete.
  void write(int rank, std::string_view bytes);
  // Ends all unfinished lines. Throws Error if the file lacks a line.
  void finish();

 private:
  void write_line(std::size_t rank, std::string_view line);

  std::filesystem::path path_;
  std::ofstream file_;
  std::vector<std::string> texts_;
  std::vector<std::string> prefixes_;
  std::vector<LineSplitter> splitters_;  // of each rank
};

}  // namespace paceline::launch
