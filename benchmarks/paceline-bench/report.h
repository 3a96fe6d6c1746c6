#pragma once

#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "measure/result.h"
#include "options.h"

namespace paceline::bench {

// A file that a flag names; without a name, there is none.
class OutputFile {
 public:
  // Opens it before anything is measured, so that a bad path fails at once. Throws Error.
  OutputFile(const char* flag, const std::string& path);
  void write(const std::string& text);

 private:
  std::string path_;
  std::ofstream file_;
};

// The tables and charts on standard output, and the files with them.
class Report {
 public:
  explicit Report(const Options& options);

  void begin_table(int ranks);
  void add(const Result& result);
  void write();

 private:
  const Options& options_;
  OutputFile file_;
  OutputFile svg_;
  nlohmann::ordered_json json_;
  std::vector<Result> topology_;
};

}  // namespace paceline::bench
