#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace paceline::base {

// A file in memory that is this process's own: writes to it do not reach the file.
class MappedFile {
 public:
  // Throws Error.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  char* data() const { return data_; }
  std::string_view content() const { return {data_, size_}; }

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace paceline::base
