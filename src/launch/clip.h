#pragma once

#include <string>
#include <string_view>

namespace paceline::launch {

// At most `size` bytes of UTF-8 text, cut between characters; "..." stands for the rest.
inline std::string clip(std::string_view text, std::size_t size) {
  if (text.size() <= size) return std::string(text);
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return std::string(text.substr(0, size)) + "...";
}

}  // namespace paceline::launch
