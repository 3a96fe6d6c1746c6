#include "output/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

namespace paceline::doctor {
namespace {

constexpr std::size_t kWidth = 100;
constexpr std::size_t kNameWidth = 16;
constexpr std::size_t kIndent = 2 + 9 + kNameWidth;  // of what follows the status and the name

std::string_view word(Status status) {
  constexpr std::string_view kWords[] = {"ok", "note", "warning", "error"};
  return kWords[static_cast<std::size_t>(status)];
}

std::string painted(std::string_view text, std::string_view colour, bool colours) {
  return colours ? fmt::format("\033[{}m{}\033[0m", colour, text) : std::string(text);
}

std::string status_column(Status status, bool colours) {
  constexpr std::string_view kColours[] = {"32", "36", "33", "1;31"};
  return painted(fmt::format("{:<8}", word(status)), kColours[static_cast<std::size_t>(status)],
                 colours);
}

std::string readable(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return name;
}

// Breaks lines between words, and indents all but the first. Control characters, which a variable
// or an error may have, do not reach the terminal.
std::string wrapped(std::string_view text) {
  std::string result;
  std::size_t column = kIndent;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    const bool is_first = begin == 0 || text[begin - 1] == '\n';
    if (begin > 0 && (is_first || column + 1 + end - begin > kWidth)) {
      result += fmt::format("\n{:{}}", "", kIndent);
      column = kIndent;
    } else if (begin > 0) {
      result += ' ';
      ++column;
    }
    result += text.substr(begin, end - begin);
    column += end - begin;
    begin = end + 1;
  }
  const auto is_control = [](unsigned char c) { return (c < ' ' && c != '\n') || c == 0x7f; };
  std::ranges::replace_if(result, is_control, '?');
  return result;
}

std::string line(const Check& check, bool colours) {
  std::string text = fmt::format("  {} {:<{}}{}\n", status_column(check.status, colours),
                                 readable(check.name), kNameWidth, wrapped(check.text));
  if (!check.advice.empty()) {
    text += fmt::format("{:{}}{}\n", "", kIndent, wrapped("-> " + check.advice));
  }
  return text;
}

std::string count(const std::vector<Group>& groups, Status status) {
  std::ptrdiff_t found = 0;
  for (const Group& group : groups) {
    found += std::ranges::count(group.checks, status, &Check::status);
  }
  if (found == 0) return fmt::format("no {}s", word(status));
  return fmt::format("{} {}{}", found, word(status), found == 1 ? "" : "s");
}

}  // namespace

std::string text_of(const Group& group, bool colours) {
  std::string text = painted(readable(group.name), "1", colours) + "\n";
  std::vector<std::string> silent;
  for (const Check& check : group.checks) {
    if (check.status == Status::ok && check.text.empty()) silent.push_back(readable(check.name));
  }
  if (!silent.empty()) {
    text += fmt::format("  {} {}\n", status_column(Status::ok, colours), fmt::join(silent, ", "));
  }
  for (const Check& check : group.checks) {
    if (check.status != Status::ok || !check.text.empty()) text += line(check, colours);
  }
  return text;
}

std::string summary(const std::vector<Group>& groups, bool colours) {
  return painted(
             fmt::format("{}, {}", count(groups, Status::error), count(groups, Status::warning)),
             "1", colours) +
         "\n";
}

}  // namespace paceline::doctor
