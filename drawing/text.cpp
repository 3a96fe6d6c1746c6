#include "drawing/text.h"

#include <algorithm>
#include <cstdint>

namespace paceline::drawing {
namespace {

// The bytes of the character at the beginning of `text`; 0 if it is none.
std::size_t length_of_first(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return first < 0x20 || first == 0x7f ? 0 : 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  std::uint32_t code = first & (0xffu >> (length + 1));
  for (const char byte : text.substr(1, length - 1)) {
    if ((static_cast<unsigned char>(byte) & 0xc0) != 0x80) return 0;
    code = code << 6 | (static_cast<unsigned char>(byte) & 0x3f);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool excluded = code < 0xa0 || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff ||
                        (code & 0xfffe) == 0xfffe;
  return overlong || excluded ? 0 : length;
}

}  // namespace

std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> result;
  while (!text.empty()) {
    const std::size_t length = length_of_first(text);
    result.emplace_back(length == 0 ? "\uFFFD" : text.substr(0, length));
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return result;
}

int columns_of(std::string_view text) {
  return static_cast<int>(characters(text).size());
}

std::string cut_to(std::string_view text, int columns) {
  std::vector<std::string> all = characters(text);
  const auto most = static_cast<std::size_t>(std::max(columns, 0));
  const bool is_cut = all.size() > most;
  all.resize(std::min(all.size(), most));
  if (is_cut && !all.empty()) all.back() = "~";
  std::string result;
  for (const std::string& one : all) result += one;
  return result;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const std::size_t space = std::min(text.find(' '), text.size());
    if (space > 0) words.emplace_back(text.substr(0, space));
    text.remove_prefix(std::min(space + 1, text.size()));
  }
  return words;
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const std::string& one : characters(text)) {
    if (one == "&") {
      result += "&amp;";
    } else if (one == "<") {
      result += "&lt;";
    } else if (one == ">") {
      result += "&gt;";
    } else if (one == "\"") {
      result += "&quot;";
    } else {
      result += one;
    }
  }
  return result;
}

}  // namespace paceline::drawing
