#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/manifest.h"

// Any bytes give a manifest that is written as it is read, or CorruptFile.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace paceline::checkpoint;
  try {
    const Manifest manifest = parse_manifest({reinterpret_cast<const char*>(bytes), size}, "fuzz");
    if (manifest.rank >= manifest.world_size) std::abort();
    const std::string text = write_manifest(manifest);
    if (write_manifest(parse_manifest(text, "fuzz")) != text) std::abort();
  } catch (const paceline::CorruptFile&) {  // as it should be
  }
  return 0;
}
