#pragma once

#include <array>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "launch/line_splitter.h"
#include "launch/output.h"

namespace paceline::launch {

// The last lines that one rank wrote, both streams together, as a terminal would have shown them.
class TailBuffer {
 public:
  static constexpr std::size_t kMaxLines = 20;
  static constexpr std::size_t kMaxBytes = 500;  // of each line; the rest becomes "..."

  void feed(Stream stream, std::string_view bytes);
  // Oldest first, unfinished lines last.
  std::vector<std::string> lines() const;

 private:
  void keep(std::string_view line);

  std::array<ScreenLine, 2> streams_;
  std::deque<std::string> lines_;
};

}  // namespace paceline::launch
