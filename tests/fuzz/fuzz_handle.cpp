#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <paceline/error.h>

#include "shm/membership/reconfigure_handle.h"

// What a program passes to reconfigure: a handle that encodes to one that is decoded alike, or a
// UsageError.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using paceline::shm::ReconfigureHandle;
  try {
    const auto handle = ReconfigureHandle::decode({reinterpret_cast<const char*>(bytes), size});
    const std::string text = handle.encode();
    if (ReconfigureHandle::decode(text).encode() != text) std::abort();
  } catch (const paceline::UsageError&) {
  }
  return 0;
}
