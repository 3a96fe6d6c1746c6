#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "internode/link_messages.h"

// What another node's leader sends: a message that encodes to the same bytes, or none.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(bytes), size);
  const auto message = paceline::internode::decode_link_message(text);
  if (message && encode(*message) != text) std::abort();
  return 0;
}
