#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace paceline::launch {

// Cuts a stream of bytes at '\n', '\r' and "\r\n", which counts as '\n'. A line longer than
// kMaxLine is cut there too, so that a worker that never ends a line cannot fill the launcher's
// memory.
class LineSplitter {
 public:
  static constexpr std::size_t kMaxLine = 1 << 20;

  // Calls emit(std::string_view line, char end) for each line that `bytes` completes; `end`, '\n'
  // or '\r', is not part of the line.
  template <typename Emit>
  void feed(std::string_view bytes, Emit&& emit) {
    while (!bytes.empty()) {
      if (after_return_) {
        after_return_ = false;
        const bool pair = bytes.front() == '\n';
        if (pair) bytes.remove_prefix(1);
        emit_pending(pair ? '\n' : '\r', emit);
        continue;
      }
      const std::size_t end = std::min(bytes.find_first_of("\r\n"), bytes.size());
      const std::size_t taken = std::min(end, kMaxLine - pending_.size());
      pending_.append(bytes.substr(0, taken));
      bytes.remove_prefix(taken);
      if (taken < end) {
        emit_pending('\n', emit);
      } else if (!bytes.empty()) {
        after_return_ = bytes.front() == '\r';
        bytes.remove_prefix(1);
        if (!after_return_) emit_pending('\n', emit);
      }
    }
  }

  // The unfinished line.
  std::string_view pending() const { return pending_; }

 private:
  template <typename Emit>
  void emit_pending(char end, Emit& emit) {
    emit(std::string_view(pending_), end);
    pending_.clear();
  }

  std::string pending_;
  bool after_return_ = false;  // the last byte was a '\r'
};

// A LineSplitter that shows lines as a terminal does: text after a '\r' replaces the line so far,
// as progress bars do.
class ScreenLine {
 public:
  // Calls emit(std::string_view line) for each line that a '\n' in `bytes` completes.
  template <typename Emit>
  void feed(std::string_view bytes, Emit&& emit) {
    splitter_.feed(bytes, [&](std::string_view line, char end) {
      if (!line.empty()) shown_ = line;
      if (end == '\r') return;
      emit(std::string_view(shown_));
      shown_.clear();
    });
  }

  // The line so far.
  std::string_view current() const {
    return splitter_.pending().empty() ? std::string_view(shown_) : splitter_.pending();
  }

 private:
  LineSplitter splitter_;
  std::string shown_;
};

}  // namespace paceline::launch
