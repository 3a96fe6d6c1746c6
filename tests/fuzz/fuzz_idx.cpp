#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "data/idx.h"

// Whatever the bytes: an array of the promised size, or CorruptFile.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  try {
    const auto array = paceline::data::parse_idx(std::span(bytes, size), "fuzz");
    std::size_t elements = 1;
    for (const std::int64_t extent : array.shape) elements *= static_cast<std::size_t>(extent);
    if (elements > array.bytes.size()) std::abort();
  } catch (const paceline::CorruptFile&) {  // as it should be
  }
  return 0;
}
