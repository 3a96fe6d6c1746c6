#pragma once

#include <string>
#include <vector>

namespace paceline::train {

// In a build without yaml-cpp, the functions throw UsageError that says so.

// A value of a YAML file: one text, or the texts of a list.
struct ConfigValue {
  std::string name;  // "optimizer.lr"
  std::vector<std::string> texts;
  bool is_list;
  int line;  // from 1
};

// The values in the content of a YAML file, whose top is a map. Throws UsageError that begins with
// `path`.
std::vector<ConfigValue> parse_yaml(const std::string& content, const std::string& path);
// The texts of a list in brackets.
std::vector<std::string> parse_yaml_list(const std::string& text, const std::string& source);
// The values as a file; `line` is ignored. Throws UsageError for texts that YAML
// does not have.
std::string write_yaml(const std::vector<ConfigValue>& values);

}  // namespace paceline::train
