#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "base/unique_fd.h"
#include "trace/span.h"

namespace paceline::trace {

// The file of one rank: a JSON array that may lack its end. Once it cannot be written, or is as
// large as it may become, that is logged, and what follows is ignored.
class TraceFile {
 public:
  // Of 100 to 150 bytes a span: half a million of them.
  static constexpr std::size_t kMaxBytes = std::size_t{64} << 20;

  // Replaces what is there. Throws Error.
  TraceFile(std::filesystem::path path, int rank, std::size_t max_bytes = kMaxBytes);

  // `events` as format.h makes them.
  void write(std::string_view events);
  void write(std::span<const Span> spans);
  void close();

 private:
  void append(std::string_view events);
  void flush();

  std::filesystem::path path_;
  int rank_;
  base::UniqueFd fd_;
  std::size_t max_bytes_;
  std::size_t written_ = 0;
  std::string text_;  // not written yet
  std::set<std::uint64_t> models_;
};

}  // namespace paceline::trace
