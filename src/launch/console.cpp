#include "launch/console.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace paceline::launch {
namespace {

std::string prefix(int rank) {
  return fmt::format("[rank{}]: ", rank);
}

}  // namespace

Console::Console(Target out, Target err, int ranks, std::function<int()> columns, int first_rank)
    : targets_{std::move(out), std::move(err)},
      sources_(static_cast<std::size_t>(ranks)),
      columns_(std::move(columns)),
      first_rank_(first_rank) {}

Console::Source& Console::source(int rank, Stream stream) {
  return sources_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(stream)];
}

int Console::columns_beside_prefix(int columns) {
  return std::max(1, columns - static_cast<int>(prefix(0).size()));
}

void Console::write(int rank, Stream stream, std::string_view bytes) {
  if (target(stream).terminal) {
    write_screen(rank, stream, bytes);
  } else {
    write_plain(rank, stream, bytes);
  }
}

void Console::write_plain(int rank, Stream stream, std::string_view bytes) {
  std::string text;
  source(rank, stream).plain.feed(bytes, [&](std::string_view line, char end) {
    // The '\r' that a bar starts with.
    if (line.empty() && end == '\r') return;
    text.append(prefix(first_rank_ + rank)).append(line).push_back(end);
  });
  if (!text.empty()) target(stream).write(text);
}

void Console::write_screen(int rank, Stream stream, std::string_view bytes) {
  std::string lines;
  source(rank, stream).screen.feed(bytes, [&](std::string_view line) {
    lines.append(prefix(first_rank_ + rank)).append(line).push_back('\n');
  });
  const bool has_bar = first_rank_ + rank == 0;
  if (has_bar) bar_stream_ = stream;
  if (lines.empty() && !has_bar) return;
  std::string text = erase_bar();
  text += lines;
  text += draw_bar();
  if (!text.empty()) target(stream).write(text);
}

std::string Console::erase_bar() {
  return std::exchange(bar_drawn_, false) ? "\r\x1b[K" : "";
}

std::string Console::draw_bar() {
  if (first_rank_ != 0) return "";
  std::string_view bar = source(0, bar_stream_).screen.current();
  if (bar.empty()) {
    bar = source(0, bar_stream_ == Stream::out ? Stream::err : Stream::out).screen.current();
  }
  bar_drawn_ = !bar.empty();
  // A line that wraps could not be erased.
  return bar_drawn_ ? prefix(0) + fit(bar, columns_beside_prefix(columns_())) : std::string();
}

void Console::finish() {
  for (const Stream stream : {Stream::out, Stream::err}) {
    std::string text = target(stream).terminal ? erase_bar() : "";
    for (int rank = 0; rank < static_cast<int>(sources_.size()); ++rank) {
      const Source& from = source(rank, stream);
      const auto rest = target(stream).terminal ? from.screen.current() : from.plain.pending();
      if (!rest.empty()) text.append(prefix(first_rank_ + rank)).append(rest).push_back('\n');
    }
    if (!text.empty()) target(stream).write(text);
  }
}

std::string fit(std::string_view text, int columns) {
  std::string result;
  int width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte == 0x1b && i + 1 < text.size() && text[i + 1] == '[') {
      // An escape sequence "\x1b[31m" ends with a byte from '@' to '~'.
      const std::size_t begin = i;
      for (i += 2; i < text.size() && (text[i] < '@' || text[i] > '~');) ++i;
      result += text.substr(begin, i + 1 - begin);
      continue;
    }
    // Neither a control character nor a continuation of a UTF-8 sequence.
    if (byte >= 0x20 && (byte & 0xC0) != 0x80) ++width;
    if (width <= columns) result += text[i];
  }
  return result;
}

}  // namespace paceline::launch
