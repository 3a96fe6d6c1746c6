#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/line_splitter.h"
#include "launch/output.h"

namespace paceline::launch {

// Merges the output of the ranks, each line prefixed "[rank0]: ", whole lines at a time.
//
// Into a file or pipe, lines ended by '\r' are passed on as such. On a terminal rank 0 may draw a
// progress bar: its unfinished line stays the last on the screen, below the lines of all ranks,
// and is redrawn in place. Other ranks cannot draw a bar: of a line that they overwrite by '\r',
// only the last state is shown.
class Console {
 public:
  struct Target {
    std::function<void(std::string_view)> write;
    bool terminal = false;  // if both are, they are one screen
  };

  // `columns` returns the width of the terminal if there is one; it may change. `first_rank` is
  // that of local rank 0.
  Console(Target out, Target err, int ranks, std::function<int()> columns, int first_rank = 0);

  void write(int local_rank, Stream stream, std::string_view bytes);
  // Ends all unfinished lines. Call after the last write.
  void finish();

  // How much of a terminal's width the prefix leaves to rank 0; at least 1.
  static int columns_beside_prefix(int columns);

 private:
  struct Source {
    LineSplitter plain;
    ScreenLine screen;
  };

  Source& source(int rank, Stream stream);
  const Target& target(Stream stream) const { return targets_[static_cast<std::size_t>(stream)]; }
  void write_plain(int rank, Stream stream, std::string_view bytes);
  void write_screen(int rank, Stream stream, std::string_view bytes);
  std::string erase_bar();
  std::string draw_bar();

  std::array<Target, 2> targets_;
  std::vector<std::array<Source, 2>> sources_;
  std::function<int()> columns_;
  int first_rank_;
  Stream bar_stream_ = Stream::err;  // rank 0's stream that was written last
  bool bar_drawn_ = false;
};

// The longest start of UTF-8 text that takes at most `columns` columns on a terminal, with all
// escape sequences of the text. Does not count the double width of some characters.
std::string fit(std::string_view text, int columns);

}  // namespace paceline::launch
