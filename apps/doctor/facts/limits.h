#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <optional>

namespace paceline::doctor {

// Limits that a process and its children have, in bytes or descriptors; unset: none.
struct Limits {
  std::optional<std::uint64_t> address_space{};     // RLIMIT_AS
  std::optional<std::uint64_t> file_size{};         // RLIMIT_FSIZE
  std::optional<std::uint64_t> locked_memory{};     // RLIMIT_MEMLOCK
  std::optional<std::uint64_t> descriptors{};       // RLIMIT_NOFILE
  std::optional<std::uint64_t> descriptors_hard{};  // to which a user may raise it
};

inline Limits read_limits() {
  const auto read = [](auto resource, rlim_t rlimit::*which) {
    rlimit limit{};
    const bool is_set = ::getrlimit(resource, &limit) == 0 && limit.*which != RLIM_INFINITY;
    return is_set ? std::optional<std::uint64_t>(limit.*which) : std::nullopt;
  };
  return {.address_space = read(RLIMIT_AS, &rlimit::rlim_cur),
          .file_size = read(RLIMIT_FSIZE, &rlimit::rlim_cur),
          .locked_memory = read(RLIMIT_MEMLOCK, &rlimit::rlim_cur),
          .descriptors = read(RLIMIT_NOFILE, &rlimit::rlim_cur),
          .descriptors_hard = read(RLIMIT_NOFILE, &rlimit::rlim_max)};
}

}  // namespace paceline::doctor
