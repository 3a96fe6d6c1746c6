#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

namespace paceline::app {

class HelpFormatter : public CLI::Formatter {
 public:
  // `usage`: what comes after "Usage: ".
  explicit HelpFormatter(std::string usage) : usage_(std::move(usage)) { column_width(30); }
  std::string make_usage(const CLI::App*, std::string) const override {
    return "\nUsage: " + usage_ + "\n\n";
  }
  // Without its leading empty line; there is one between groups already.
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    return CLI::Formatter::make_group(group, is_positional, options).substr(1);
  }

 private:
  std::string usage_;
};

}  // namespace paceline::app
