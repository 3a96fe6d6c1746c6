#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "nodes/messages.h"

// What another launcher sends: a message that can be sent on as it is, or none.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using paceline::nodes::decode;
  const auto message = decode({reinterpret_cast<const char*>(bytes), size});
  if (!message) return 0;
  const auto again = decode(encode(*message));
  if (!again || again->index() != message->index()) std::abort();
  return 0;
}
