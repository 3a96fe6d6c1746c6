#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace paceline::doctor {

// "1 core", "3 cores".
inline std::string plural(std::int64_t count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

// "23.5 GiB", "512.0 MiB", "12.0 KiB".
inline std::string size_text(std::uint64_t bytes) {
  const auto in = [&](int shift, const char* unit) {
    return fmt::format("{:.1f} {}", static_cast<double>(bytes) / (std::uint64_t{1} << shift), unit);
  };
  if (bytes >> 30 != 0) return in(30, "GiB");
  return bytes >> 20 != 0 ? in(20, "MiB") : in(10, "KiB");
}

// The number in OMP_NUM_THREADS, which may be a list with a number for each level; empty if it is
// not one.
inline std::optional<int> thread_count(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool ends = end == text.data() + text.size() || *end == ',';
  return error == std::errc() && ends && number > 0 ? std::optional(number) : std::nullopt;
}

}  // namespace paceline::doctor
