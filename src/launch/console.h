#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/line_splitter.h"
#include "launch/output.h"

namespace paceline::launch {

// Merges the output of the ranks of this machine, each line with its rank's prefix, whole lines at
// a time. Ranks are local ones.
//
// Into a file or pipe, lines ended by '\r' are passed on as such. On a terminal one rank may draw a
// progress bar: its unfinished line stays the last on the screen, below the lines of all ranks,
// and is redrawn in place. Other ranks cannot draw a bar: of a line that they overwrite by '\r',
// only the last state is shown.
class Console {
 public:
  struct Target {
    std::function<void(std::string_view)> write;
    bool terminal = false;  // if both are, they are one screen
  };

  // `prefixes`: of each rank's lines. `bar_rank`: the rank that may draw a bar, if one may.
  // `columns` returns the width of the terminal if there is one; it may change.
  Console(Target out, Target err, std::vector<std::string> prefixes, std::optional<int> bar_rank,
          std::function<int()> columns);

  void write(int local_rank, Stream stream, std::string_view bytes);
  // Ends all unfinished lines. Call after the last write.
  void finish();

  // How much of a terminal's width a prefix leaves to its rank; at least 1.
  static int columns_beside(std::string_view prefix, int columns);

 private:
  struct Source {
    LineSplitter plain;
    ScreenLine screen;
  };

  Source& source(int rank, Stream stream);
  const std::string& prefix(int rank) const { return prefixes_[static_cast<std::size_t>(rank)]; }
  const Target& target(Stream stream) const { return targets_[static_cast<std::size_t>(stream)]; }
  void write_plain(int rank, Stream stream, std::string_view bytes);
  void write_screen(int rank, Stream stream, std::string_view bytes);
  std::string erase_bar();
  std::string draw_bar();

  std::array<Target, 2> targets_;
  std::vector<std::string> prefixes_;
  std::vector<std::array<Source, 2>> sources_;
  std::optional<int> bar_rank_;
  std::function<int()> columns_;
  Stream bar_stream_ = Stream::err;  // the bar rank's stream that was written last
  bool bar_drawn_ = false;
};

// The columns that UTF-8 text takes on a terminal: as `fit` counts them.
int width(std::string_view text);

// The longest start of UTF-8 text that takes at most `columns` columns on a terminal, with all
// escape sequences of the text. Does not count the double width of some characters.
std::string fit(std::string_view text, int columns);

}  // namespace paceline::launch
