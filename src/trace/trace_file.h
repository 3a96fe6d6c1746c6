#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "base/unique_fd.h"
#include "trace/cpu_use.h"
#include "trace/span.h"

namespace paceline::trace {

// The file of one rank: a JSON array that may lack its end. If a write fails, or the
// file reaches its size limit, that is logged and later events are ignored.
class TraceFile {
 public:
  // Half a million spans of 100 to 150 bytes.
  static constexpr std::size_t kMaxBytes = std::size_t{64} << 20;

  // Replaces an existing file by a new one, so that a process that writes into the old one does not
  // spoil it. Throws Error.
  TraceFile(std::filesystem::path path, int rank, std::size_t max_bytes = kMaxBytes);

  // `events` are made by format.h.
  void write(std::string_view events);
  void write(std::span<const Span> spans);
  void write(std::span<const ThreadUse> samples);
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
  std::set<std::uint64_t> models_on_devices_;
};

}  // namespace paceline::trace
