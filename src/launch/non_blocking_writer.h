#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace paceline::launch {

// Text on its way to a descriptor that may not take it at once, such as a full pipe or a stopped
// terminal. What does not go is kept, so that nobody has to wait for it.
class NonBlockingWriter {
 public:
  // `fd` is not owned. `name` is what errors call it.
  NonBlockingWriter(int fd, const char* name) : fd_(fd), name_(name) {}

  int fd() const { return fd_; }
  // There is text left; write_some() goes on when fd() is writable.
  bool pending() const { return !text_.empty(); }

  // These throw Error if the descriptor takes no more text at all.
  void write(std::string_view text);
  void write_some();
  // Waits until everything is written, or `patience` passes without any of it going.
  void finish(std::optional<std::chrono::milliseconds> patience);

 private:
  int fd_;
  const char* name_;
  std::string text_;
};

}  // namespace paceline::launch
