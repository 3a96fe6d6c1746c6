#include "launch/console.h"

#include <algorithm>
#include <utility>

namespace paceline::launch {
namespace {

// Calls visit(piece, columns) for each escape sequence and each other byte of the text.
template <typename Visit>
void for_each_piece(std::string_view text, Visit&& visit) {
  for (std::size_t size = 0; !text.empty(); text.remove_prefix(size)) {
    const auto byte = static_cast<unsigned char>(text.front());
    size = 1;
    if (text.starts_with("\x1b[")) {
      // An escape sequence "\x1b[31m" ends with a byte from '@' to '~'.
      for (size = 2; size < text.size() && (text[size] < '@' || text[size] > '~');) ++size;
      size = std::min(size + 1, text.size());
    }
    // Neither a control character nor a continuation of a UTF-8 sequence.
    const bool is_shown = byte >= 0x20 && (byte & 0xC0) != 0x80;
    visit(text.substr(0, size), is_shown ? 1 : 0);
  }
}

}  // namespace

Console::Console(Target out, Target err, std::vector<std::string> prefixes,
                 std::optional<int> bar_rank, std::function<int()> columns)
    : targets_{std::move(out), std::move(err)},
      prefixes_(std::move(prefixes)),
      sources_(prefixes_.size()),
      bar_rank_(bar_rank),
      columns_(std::move(columns)) {}

Console::Source& Console::source(int rank, Stream stream) {
  return sources_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(stream)];
}

int Console::columns_beside(std::string_view prefix, int columns) {
  return std::max(1, columns - width(prefix));
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
    text.append(prefix(rank)).append(line).push_back(end);
  });
  if (!text.empty()) target(stream).write(text);
}

void Console::write_screen(int rank, Stream stream, std::string_view bytes) {
  std::string lines;
  source(rank, stream).screen.feed(bytes, [&](std::string_view line) {
    lines.append(prefix(rank)).append(line).push_back('\n');
  });
  if (rank == bar_rank_) bar_stream_ = stream;
  if (lines.empty() && rank != bar_rank_) return;
  std::string text = erase_bar();
  text += lines;
  text += draw_bar();
  if (!text.empty()) target(stream).write(text);
}

std::string Console::erase_bar() {
  return std::exchange(bar_drawn_, false) ? "\r\x1b[K" : "";
}

std::string Console::draw_bar() {
  if (!bar_rank_) return "";
  std::string_view bar = source(*bar_rank_, bar_stream_).screen.current();
  if (bar.empty()) {
    const Stream other = bar_stream_ == Stream::out ? Stream::err : Stream::out;
    bar = source(*bar_rank_, other).screen.current();
  }
  bar_drawn_ = !bar.empty();
  if (!bar_drawn_) return "";
  // A line that wraps could not be erased.
  const std::string& before = prefix(*bar_rank_);
  return before + fit(bar, columns_beside(before, columns_()));
}

void Console::finish() {
  for (const Stream stream : {Stream::out, Stream::err}) {
    std::string text = target(stream).terminal ? erase_bar() : "";
    for (int rank = 0; rank < static_cast<int>(sources_.size()); ++rank) {
      const Source& from = source(rank, stream);
      const auto rest = target(stream).terminal ? from.screen.current() : from.plain.pending();
      if (!rest.empty()) text.append(prefix(rank)).append(rest).push_back('\n');
    }
    if (!text.empty()) target(stream).write(text);
  }
}

int width(std::string_view text) {
  int columns = 0;
  for_each_piece(text, [&](std::string_view, int own) { columns += own; });
  return columns;
}

std::string fit(std::string_view text, int columns) {
  std::string result;
  for_each_piece(text, [&](std::string_view piece, int own) {
    columns -= own;
    if (columns >= 0 || piece.size() > 1) result += piece;
  });
  return result;
}

}  // namespace paceline::launch
