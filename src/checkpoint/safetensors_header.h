#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::checkpoint {

// A tensor of a safetensors file: https://github.com/huggingface/safetensors, "Format".
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // one for which bits_of is not 0
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // of its bytes, from the start of the file
  std::uint64_t size = 0;   // in bytes, as dtype and shape say
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

// Of one element of a type: "F32", "BF16", ...; 0 for a name that is none.
int bits_of(std::string_view dtype);

// Parses the header of a file's content. Throws CorruptFile, which names `path` and the byte or the
// tensor, unless the tensors fill the rest of the file without gaps and overlaps. What it allocates
// is bounded by the size of the content.
SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& path);

// The beginning of a file with these tensors, whose bytes follow in this order without gaps. Its
// size is a multiple of 64. The offsets of `header` are ignored. Throws UsageError for texts that
// are not UTF-8.
std::string make_safetensors_header(const SafetensorsHeader& header);

}  // namespace paceline::checkpoint
