#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include <paceline/error.h>

namespace paceline::doctor {

std::optional<Options> parse_options(std::vector<std::string> arguments, std::string& help) {
  Options options;
  bool no_self_test = false;
  CLI::App app("Checks whether Paceline works on this machine, and says why if it does not.",
               "paceline doctor");
  app.add_flag("--json", options.json, "Print one JSON document instead")->disable_flag_override();
  app.add_flag("--no-self-test", no_self_test, "Do not start ranks that try each backend")
      ->disable_flag_override();
  app.add_option("--self-test-rank", options.self_test_rank)->group("");  // how it starts them
  app.footer("Exit code: 0 without errors (warnings are allowed), 1 with an error.");
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    help = app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  options.self_test = !no_self_test;
  return options;
}

}  // namespace paceline::doctor
