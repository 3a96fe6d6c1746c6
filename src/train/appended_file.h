#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace paceline::train {

// Appends what is added to a file, in memory until flush.
class AppendedFile {
 public:
  // Throws Error.
  explicit AppendedFile(std::filesystem::path path);

  void add(std::string_view text) { pending_ += text; }
  // Throws Error.
  void flush();

 private:
  std::filesystem::path path_;
  base::UniqueFd fd_;
  std::string pending_;
};

}  // namespace paceline::train
