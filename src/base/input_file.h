#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace paceline::base {

// A regular file that is read from front to back.
class InputFile {
 public:
  // Throws Error if it cannot be opened or is not a regular file. Does not wait for a pipe's
  // writer.
  explicit InputFile(const std::filesystem::path& path);

  int fd() const { return fd_.get(); }
  // When it was opened.
  std::size_t size() const { return size_; }
  // Appends the next `count` bytes to `content`: fewer only at the end. Throws Error, also if there
  // is no memory for them.
  void read(std::vector<std::uint8_t>& content, std::size_t count);

 private:
  std::string path_;
  UniqueFd fd_;
  std::size_t size_ = 0;
};

// The content of a regular file. Throws Error.
std::vector<std::uint8_t> read_file(const std::filesystem::path& path);

}  // namespace paceline::base
