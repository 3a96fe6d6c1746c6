#include "report_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "help_formatter.h"
#include "print.h"
#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "report/json.h"
#include "report/page/page.h"
#include "report/timelines/job.h"

namespace paceline::app {
namespace {

struct ReportOptions {
  std::string directory;
  std::string output;
  bool json = false;
  std::string help;  // what to print if help was asked for
};

ReportOptions parse_report_options(std::vector<std::string> arguments) {
  ReportOptions options;
  CLI::App app("Finds the bottleneck of a run and draws it as one HTML page.");
  app.formatter(std::make_shared<HelpFormatter>("paceline report DIR [--output FILE] [--json]"));
  app.add_option("DIR", options.directory,
                 "The directory that PACELINE_TIMELINE named, with a rank*.json for each rank")
      ->required()
      ->type_name("")
      ->group("Input");
  app.add_option("--output", options.output,
                 "Write the page to this file (default DIR/report.html)")
      ->type_name("FILE")
      ->group("Output");
  app.add_flag("--json", options.json,
               "Print the diagnosis and its figures as JSON; write a page only with --output")
      ->group("Output");
  app.set_help_flag("-h,--help", "Print this and exit")->group("Other");
  app.footer(
      "Example:\n"
      "  PACELINE_TIMELINE=trace paceline run --nproc-per-node 2 ./train\n"
      "  paceline report trace");
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (options.output.empty() && !options.json) {
    options.output = (std::filesystem::path(options.directory) / "report.html").string();
  }
  return options;
}

void write_page(const std::string& path, const std::string& page) {
  errno = 0;
  std::ofstream file(path);
  file << page;
  file.close();
  if (!file) throw base::errno_error("cannot write " + path, errno != 0 ? errno : EIO);
}

std::optional<report::Prediction> first_prediction(const report::Diagnosis& diagnosis) {
  return diagnosis.remedies.empty() ? std::nullopt : diagnosis.remedies.front().prediction;
}

}  // namespace

int report_command(const std::vector<std::string>& arguments) {
  const ReportOptions options = parse_report_options(arguments);
  if (!options.help.empty()) {
    std::fputs(options.help.c_str(), stdout);
    return 0;
  }
  const report::Job job = report::read_job(options.directory);
  const report::Analysis analysis = report::analyse(job);
  const report::Diagnosis diagnosis = report::diagnose(analysis);
  for (const std::string& note : job.notes) {
    std::fputs(fmt::format("paceline report: {}\n", note).c_str(), stderr);
  }
  if (options.json) {
    print(report::report_json(job, analysis, diagnosis) + '\n');
  } else {
    const auto gain = first_prediction(diagnosis);
    print(diagnosis.sentence + '\n' + (gain ? report::text_of(*gain) + '\n' : ""));
  }
  // Last: a page that cannot be written costs nothing else.
  if (!options.output.empty()) {
    write_page(options.output, report::report_page(job, analysis, diagnosis));
    if (!options.json) print(options.output + '\n');
  }
  return 0;
}

}  // namespace paceline::app
