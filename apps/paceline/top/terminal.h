#pragma once

#include <chrono>
#include <csignal>
#include <cstddef>
#include <string>
#include <vector>

namespace paceline::top {

// Standard output. On a terminal, each text takes the place of the one before; elsewhere, texts
// follow each other. While it lives, signals that end the process, and changes of the terminal's
// size, come to `wait` only.
class Terminal {
 public:
  Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
  // Shows the cursor again, below the last text.
  ~Terminal();

  struct Size {
    std::size_t columns = 0;  // 0: no limit
    std::size_t rows = 0;
  };
  Size size() const;
  // Throws Error if it cannot be written.
  void show(const std::vector<std::string>& lines);
  // Returns a signal that came meanwhile, or 0 after `time`.
  int wait(std::chrono::nanoseconds time) const;

 private:
  bool is_terminal_;
  sigset_t signals_;
  sigset_t before_;
  std::size_t shown_ = 0;    // lines of the last text
  std::size_t columns_ = 0;  // for which it was drawn
};

}  // namespace paceline::top
