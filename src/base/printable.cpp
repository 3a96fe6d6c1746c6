#include "base/printable.h"

#include <fmt/format.h>

#include "base/utf8.h"

namespace paceline::base {
namespace {

// The length of the character of several bytes that `text` begins with; 0 if it is not UTF-8.
std::size_t length_of_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (length == 0 || length > text.size()) return 0;
  return is_utf8(std::string(text.substr(0, length))) ? length : 0;
}

// U+0080 to U+009F are C2 80 to C2 9F.
bool is_c1_control(std::string_view character) {
  return character[0] == '\xC2' && static_cast<unsigned char>(character[1]) < 0xA0;
}

std::string spell_out(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const auto byte = static_cast<unsigned char>(text.front());
    const bool is_ascii = byte < 0x80;
    const std::size_t length = is_ascii ? 1 : length_of_character(text);
    const std::string_view character = text.substr(0, length);
    const bool is_control = byte < 0x20 || byte == 0x7F;
    if (length == 0 || (is_control && kept.find(text.front()) == kept.npos)) {
      result += fmt::format("\\x{:02x}", byte);
    } else if (!is_ascii && is_c1_control(character)) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned char>(character[1]));
    } else {
      result += character;
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) {
  return spell_out(text, "\n\t");
}

std::string printable_line(std::string_view text) {
  return spell_out(text, "");
}

}  // namespace paceline::base
