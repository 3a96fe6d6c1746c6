#include "shm/memory/copy.h"

#include <algorithm>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/cores.h"
#include "shm/p2p/message_header.h"

namespace paceline::shm {

#ifdef __SSE2__
void stream_bytes(void* target, const void* source, std::size_t bytes) {
  if (target == source) return;
  // Only whole lines benefit.
  const std::size_t before = (0 - reinterpret_cast<std::uintptr_t>(target)) % kCacheLine;
  const std::size_t head = std::min(before, bytes);
  const std::size_t lines = (bytes - head) / kCacheLine * kCacheLine;
  copy_bytes(target, source, head);
  constexpr std::size_t kRegister = sizeof(__m128i);
  const auto* const from = reinterpret_cast<const __m128i*>(advance(source, head));
  auto* const to = reinterpret_cast<__m128i*>(advance(target, head));
  for (std::size_t i = 0; i < lines / kRegister; i += kCacheLine / kRegister) {
    __m128i line[kCacheLine / kRegister];
    for (std::size_t j = 0; j < std::size(line); ++j) line[j] = _mm_loadu_si128(from + i + j);
    for (std::size_t j = 0; j < std::size(line); ++j) _mm_stream_si128(to + i + j, line[j]);
  }
  _mm_sfence();
  copy_bytes(advance(target, head + lines), advance(source, head + lines), bytes - head - lines);
}
#else
void stream_bytes(void* target, const void* source, std::size_t bytes) {
  copy_bytes(target, source, bytes);
}
#endif

void take_lines(std::byte* begin, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kCacheLine) {
    *static_cast<volatile std::byte*>(begin + i) = std::byte{0};
  }
}

Copy copy_of_results(std::size_t bytes) {
  static const std::size_t cache = base::last_level_cache();
  return cache > 0 && bytes > cache ? stream_bytes : copy_bytes;
}

}  // namespace paceline::shm
