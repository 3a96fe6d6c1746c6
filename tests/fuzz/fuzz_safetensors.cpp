#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/safetensors_header.h"

// Any bytes give tensors that fill the file side by side, or CorruptFile.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(bytes), size);
  try {
    std::uint64_t end = 0;
    for (const auto& tensor :
         paceline::checkpoint::parse_safetensors_header(file, "fuzz").tensors) {
      if (end != 0 && tensor.begin != end) std::abort();
      end = tensor.begin + tensor.size;
      if (end > size) std::abort();
    }
    if (end != 0 && end != size) std::abort();
  } catch (const paceline::CorruptFile&) {  // as it should be
  }
  return 0;
}
