#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include <paceline/error.h>
#include <paceline/version.h>

#include "launch/program.h"
#include "other_command.h"
#include "print.h"
#include "report_command.h"
#include "run_command.h"
#include "top_command.h"

namespace {

constexpr int kUsageExitCode = 2;

constexpr std::string_view kHelp =
    R"(Distributed data-parallel training for C++.

Usage: paceline COMMAND [arguments...]

Commands:
  run      start a program as several processes, on one machine or on several
  report   find the bottleneck in what PACELINE_TIMELINE recorded, and draw it
  top      show where the time goes while a program trains
  bench    measure collectives and training steps
  doctor   check whether Paceline works on this machine, and why not

Run 'paceline COMMAND --help' for its flags. Example:
  paceline run --nproc-per-node 2 ./train
)";

// A pipe with one of their numbers would be taken for a standard stream.
void open_standard_streams() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) ::close(fd);
}

int dispatch(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "--help";
  if (command == "run") return paceline::app::run_command({argv + 2, argv + argc});
  if (command == "report") return paceline::app::report_command({argv + 2, argv + argc});
  if (command == "top") return paceline::app::top_command({argv + 2, argv + argc});
  if (command == "bench" || command == "doctor") {
    paceline::app::become_other_command(std::string(command), argv + 1);
  }
  if (command == "--help" || command == "-h" || command == "help") {
    paceline::app::print(std::string(kHelp));
    return 0;
  }
  if (command == "--version") {
    paceline::app::print(fmt::format("paceline {}\n", paceline::kVersion));
    return 0;
  }
  throw paceline::UsageError(
      fmt::format("unknown command '{}'; expected run, report, top, bench or doctor", command));
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  const std::string_view command = argc > 1 ? argv[1] : "";
  const char* const prefix = command == "run"      ? "paceline run"
                             : command == "report" ? "paceline report"
                             : command == "top"    ? "paceline top"
                                                   : "paceline";
  try {
    return dispatch(argc, argv);
  } catch (const paceline::launch::ProgramError& error) {
    std::fprintf(stderr, "%s: %s\n", prefix, error.what());
    return error.exit_code();
  } catch (const paceline::UsageError& error) {
    std::fprintf(stderr, "%s: %s\nRun '%s --help' for help.\n", prefix, error.what(), prefix);
    return kUsageExitCode;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", prefix, error.what());
    return 1;
  }
}
