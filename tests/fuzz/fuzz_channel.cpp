#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "net/secure_channel.h"

// Bytes from somebody who does not know the secret, in pieces: no message, and nothing but random
// bytes in return.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using paceline::net::SecureChannel;
  static const auto key = paceline::net::make_key("a secret that no input knows");
  const std::string text(reinterpret_cast<const char*>(bytes), size);
  const std::size_t piece = size == 0 ? 1 : 1 + bytes[0] % 40U;
  for (const auto side : {SecureChannel::Side::accepting, SecureChannel::Side::connecting}) {
    SecureChannel channel(key, side);
    channel.take_output();
    channel.send("a message");
    try {
      for (std::size_t at = 0; at < size; at += piece) {
        if (!channel.receive(text.substr(at, piece)).empty()) std::abort();
      }
    } catch (const paceline::net::ChannelError&) {  // as it should be
    }
    const bool accepts = side == SecureChannel::Side::accepting;
    if (channel.authenticated() || (accepts && channel.take_output().size() > 32)) std::abort();
  }
  return 0;
}
