#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/pending_text.h"
#include "base/unique_fd.h"

namespace paceline::launch {

// Writes text to a descriptor that may not take it at once, such as a full pipe or a stopped
// terminal. Keeps what the descriptor does not take yet, so that no call waits for it.
class NonBlockingWriter {
 public:
  // `fd` is not owned; loss() calls it `name`.
  NonBlockingWriter(int fd, const char* name);

  int fd() const { return terminal_ ? terminal_.get() : fd_; }
  // Whether text is left; call write_some() when fd() is writable.
  bool pending() const { return !text_.empty(); }

  // How much text was dropped and why, if some was: the disk is full, or nobody can read it.
  std::string loss() const;

  // What the descriptor refuses is dropped. The process must not die of SIGPIPE or SIGXFSZ then.
  void write(std::string_view text);
  void write_some();
  // Waits until everything is written, or until nothing could be written for `timeout`.
  void finish(std::optional<std::chrono::milliseconds> timeout);

 private:
  int fd_;
  base::UniqueFd terminal_;  // the same one, if it is a terminal
  const char* name_;
  base::PendingText text_;
  std::size_t dropped_ = 0;  // bytes
  int dropped_for_ = 0;      // errno
};

}  // namespace paceline::launch
