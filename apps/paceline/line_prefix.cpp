#include "line_prefix.h"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "base/address.h"

namespace paceline::app {
namespace {

// Of the name at the start of `text`; 0 if there is none.
std::size_t name_size(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  std::size_t size = 0;
  while (size < text.size() &&
         (is_letter(text[size]) || (size > 0 && text[size] >= '0' && text[size] <= '9'))) {
    ++size;
  }
  return size;
}

// A reference at the start of `text`, which begins with a '$'.
struct Reference {
  std::string name;
  std::size_t size;
};

std::optional<Reference> parse_reference(std::string_view text) {
  const bool braced = text.substr(1).starts_with('{');
  const std::size_t begin = braced ? 2 : 1;
  const std::size_t size = name_size(text.substr(begin));
  if (size == 0 || (braced && text.substr(begin + size, 1) != "}")) return std::nullopt;
  return Reference{std::string(text.substr(begin, size)), begin + size + (braced ? 1 : 0)};
}

}  // namespace

std::string substitute(std::string_view text, const std::map<std::string, std::string>& values) {
  std::string result;
  while (!text.empty()) {
    std::size_t size = 1;
    if (text.starts_with("$$")) {
      size = 2;
      result += '$';
    } else if (const auto reference = text.front() == '$' ? parse_reference(text) : std::nullopt;
               reference && values.contains(reference->name)) {
      size = reference->size;
      result += values.at(reference->name);
    } else {
      result += text.front();
    }
    text.remove_prefix(size);
  }
  return result;
}

std::vector<std::string> make_line_prefixes(std::string text, const launch::JobSpec& job) {
  const char* const variable = std::getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  if (text.empty() && variable != nullptr) text = variable;
  if (text.empty()) text = "[rank${rank}]: ";
  std::map<std::string, std::string> values{{"role_name", job.role},
                                            {"hostname", base::host_name()}};
  std::vector<std::string> prefixes;
  for (int local_rank = 0; local_rank < job.processes; ++local_rank) {
    values["local_rank"] = std::to_string(local_rank);
    values["rank"] = std::to_string(job.first_rank + local_rank);
    prefixes.push_back(substitute(text, values));
  }
  return prefixes;
}

}  // namespace paceline::app
