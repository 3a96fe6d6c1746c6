#include "other_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "launch/program.h"

namespace paceline::app {

void become_other_command(const std::string& name, char** arguments) {
  std::error_code error;
  auto here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  // Without /proc, `paceline doctor` still says what is wrong with it.
  if (error)
    here = std::filesystem::path(launch::find_program(::program_invocation_name)).parent_path();
  const auto beside = here / ("paceline-" + name);
  const auto libexec = here.parent_path() / "libexec" / "paceline" / ("paceline-" + name);
  for (const auto& path : {beside, libexec}) {
    if (!std::filesystem::exists(path)) continue;
    ::execv(path.c_str(), arguments);
    throw base::errno_error(fmt::format("cannot execute {}", path.string()));
  }
  throw UsageError(fmt::format(
      "paceline {} is not installed: neither {} nor {} exists; `make build` in a clone of Paceline "
      "builds it as build/release/bin/paceline-{}",
      name, beside.string(), libexec.string(), name));
}

}  // namespace paceline::app
