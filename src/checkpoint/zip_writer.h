#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/file_writer.h"

namespace paceline::checkpoint {

// Writes a ZIP archive as torch.save does: records are not compressed, and begin at multiples of 64
// bytes. After PKWARE's APPNOTE 6.3.10, with ZIP64 where a size or a number needs it.
class ZipWriter {
 public:
  // Must outlive this.
  explicit ZipWriter(FileWriter& file) : file_(file) {}

  // The name must be ASCII and at most 1000 bytes long. Throws Error, as finish.
  void add(std::string name, std::string_view content);
  // Writes what follows the records. Nothing may be added afterwards.
  void finish();

 private:
  struct Entry {
    std::string name;
    std::uint32_t crc32;
    std::uint64_t size;
    std::uint64_t offset;  // of its local header in the file
  };

  FileWriter& file_;
  std::vector<Entry> entries_;
};

}  // namespace paceline::checkpoint
