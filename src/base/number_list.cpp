#include "base/number_list.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/parse.h"

namespace paceline::base {

std::string list_text(std::span<const int> numbers) {
  std::string text;
  for (std::size_t begin = 0; begin < numbers.size();) {
    std::size_t end = begin;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", numbers[begin]);
    if (end > begin) text += fmt::format("-{}", numbers[end]);
    begin = end + 1;
  }
  return text;
}

std::vector<int> parse_list(std::string_view text, int end) {
  std::vector<int> numbers;
  for (const std::string_view range : split_at_commas(text)) {
    const std::size_t dash = std::min(range.find('-'), range.size());
    const int least = numbers.empty() ? 0 : numbers.back() + 1;
    const auto first = parse_number(range.substr(0, dash), least, end - 1);
    if (!first) return {};
    const auto last =
        dash == range.size() ? first : parse_number(range.substr(dash + 1), *first, end - 1);
    if (!last) return {};
    for (int number = *first; number <= *last; ++number) numbers.push_back(number);
  }
  return numbers;
}

}  // namespace paceline::base
