#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace paceline::data {

// The element types of the IDX format, by their code in its third byte.
enum class IdxType : std::uint8_t {
  uint8 = 0x08,
  int8 = 0x09,
  int16 = 0x0B,
  int32 = 0x0C,
  float32 = 0x0D,
  float64 = 0x0E,
};

struct IdxArray {
  IdxType type = IdxType::uint8;
  std::vector<std::int64_t> shape;  // at least one dimension
  std::vector<std::uint8_t> bytes;  // row-major, elements in this machine's byte order
};

// Parses the content of an IDX file, which may be compressed by gzip. Throws CorruptFile, which
// names `path` and the byte, unless `file` is exactly one complete array. The memory that it
// allocates is bounded by the data in the file, not by the sizes in the header.
IdxArray parse_idx(std::span<const std::uint8_t> file, const std::string& path);

// The same for a file on disk. Throws Error if it cannot be read.
IdxArray read_idx_file(const std::filesystem::path& path);

}  // namespace paceline::data
