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

// Neighbouring numbers give unrelated ones (Steele, Lea and Flood, "Fast Splittable Pseudorandom
// Number Generators", OOPSLA 2014).
inline std::uint64_t splitmix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
  value = (value ^ value >> 27) * 0x94d049bb133111eb;
  return value ^ value >> 31;
}

}  // namespace paceline::base
