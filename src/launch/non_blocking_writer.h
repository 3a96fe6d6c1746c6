#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace paceline::launch {

// Writes text to a descriptor that may not take it at once, such as a full pipe or a stopped
// terminal. Keeps what the descriptor does not take yet, so that no call waits for it.
class NonBlockingWriter {
 public:
  // `fd` is not owned; errors call it `name`.
  NonBlockingWriter(int fd, const char* name) : fd_(fd), name_(name) {}

  int fd() const { return fd_; }
  // Whether text is left; call write_some() when fd() is writable.
  bool pending() const { return !text_.empty(); }

  // These throw Error if the descriptor fails.
  void write(std::string_view text);
  void write_some();
  // Waits until everything is written, or until nothing could be written for `timeout`.
  void finish(std::optional<std::chrono::milliseconds> timeout);

 private:
  int fd_;
  const char* name_;
  std::string text_;
};

}  // namespace paceline::launch
