#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace paceline::checkpoint {

// Writes a file that appears under its name as a whole, or not at all: a temporary file in the same
// directory, which is removed if commit is not called.
class FileWriter {
 public:
  // Throws Error.
  explicit FileWriter(std::filesystem::path path);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  ~FileWriter();

  // Throws Error.
  void write(std::string_view bytes);
  // Waits until the file is on the disk, and gives it its name. Throws Error.
  void commit();

 private:
  [[noreturn]] void fail() const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  base::UniqueFd file_;
};

}  // namespace paceline::checkpoint
