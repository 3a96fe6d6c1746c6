#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::train {

// A value of a YAML file: one text, or those of a list.
struct ConfigValue {
  std::string name;  // "optimizer.lr"
  std::vector<std::string> texts;
  bool is_list;
  int line;  // from 1
};

// The values in the content of a YAML file, whose top is a map. Throws UsageError that begins with
// `path`. All of them do in a
// build without yaml-cpp.
std::vector<ConfigValue> parse_yaml(const std::string& content, const std::string& path);
// The texts of a list in brackets.
std::vector<std::string> parse_yaml_list(const std::string& text, const std::string& source);
// The values as a file; `line` is ignored.
std::string write_yaml(const std::vector<ConfigValue>& values);

// The name that differs least from a wrong one; empty if all are too different.
std::string nearest_name(std::string_view wrong, const std::vector<std::string>& names);

}  // namespace paceline::train
