#include "launch/tail_buffer.h"

#include "launch/clip.h"

namespace paceline::launch {

void TailBuffer::feed(Stream stream, std::string_view bytes) {
  streams_[static_cast<std::size_t>(stream)].feed(bytes,
                                                  [this](std::string_view line) { keep(line); });
}

std::vector<std::string> TailBuffer::lines() const {
  TailBuffer all = *this;
  for (const ScreenLine& stream : streams_) {
    if (!stream.current().empty()) all.keep(stream.current());
  }
  return {all.lines_.begin(), all.lines_.end()};
}

void TailBuffer::keep(std::string_view line) {
  if (lines_.size() == kMaxLines) lines_.pop_front();
  lines_.push_back(clip(line, kMaxBytes));
}

}  // namespace paceline::launch
