#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"

namespace paceline::checkpoint {

// Writes a file that appears under its name as a whole, or not at all: a temporary file in the same
// directory, which is removed if commit is not called. An earlier file's permissions are kept,
// where the file system has some.
class FileWriter {
 public:
  struct Options {
    bool fsync = true;      // whether commit waits until the file is on the disk
    bool checksum = false;  // whether crc32() is computed
  };

  // Throws Error.
  explicit FileWriter(std::filesystem::path path) : FileWriter(std::move(path), {}) {}
  FileWriter(std::filesystem::path path, const Options& options);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  ~FileWriter();

  // Throws Error.
  void write(std::string_view bytes);
  // Gives the file its name. Throws Error.
  void commit();

  // Of what was written.
  std::uint64_t size() const { return size_; }
  std::uint32_t crc32() const { return crc32_; }

 private:
  void flush();
  void write_out(std::string_view bytes);
  [[noreturn]] void fail() const;

  std::filesystem::path path_;
  Options options_;
  std::uint64_t size_ = 0;
  std::uint64_t written_ = 0;  // without what is in the buffer
  bool can_allocate_ = true;
  std::string buffer_;
  std::uint32_t crc32_ = 0;
  std::filesystem::path temporary_;
  base::UniqueFd file_;
};

// Makes a directory and its missing parents. `fsync`: waits until their names are on the disk.
// Throws Error or std::filesystem::filesystem_error.
void create_directories(const std::filesystem::path& directory, bool fsync);
// Waits until the names in a directory are on the disk. Throws Error.
void sync_directory(const std::filesystem::path& directory);

// The CRC-32 of the bytes. `crc32` is that of the bytes before them.
std::uint32_t crc32_of(std::string_view bytes, std::uint32_t crc32 = 0);

}  // namespace paceline::checkpoint
