#pragma once

#include <cstdint>
#include <string_view>

namespace paceline::base {

// FNV-1a: the same in every process, which std::hash does not promise.
inline std::uint64_t hash(std::string_view text) {
  std::uint64_t result = 0xcbf29ce484222325;
  for (const char character : text) {
    result = (result ^ static_cast<unsigned char>(character)) * 0x100000001b3;
  }
  return result;
}

}  // namespace paceline::base
