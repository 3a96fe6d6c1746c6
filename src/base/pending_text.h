#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace paceline::base {

// Text that is written in parts. What is left moves to the front only once half of it is written,
// so the cost of all parts is linear.
class PendingText {
 public:
  void append(std::string_view text) { text_ += text; }
  std::string_view rest() const { return std::string_view(text_).substr(written_); }
  bool empty() const { return written_ == text_.size(); }
  void remove_prefix(std::size_t size) {
    written_ += size;
    if (written_ < text_.size() / 2) return;
    text_.erase(0, written_);
    written_ = 0;
  }
  void clear() {
    text_.clear();
    written_ = 0;
  }

 private:
  std::string text_;
  std::size_t written_ = 0;
};

}  // namespace paceline::base
