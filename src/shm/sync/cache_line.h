#pragma once

#include <cstddef>

namespace paceline::shm {

inline constexpr std::size_t kCacheLine = 64;  // bytes

}  // namespace paceline::shm
