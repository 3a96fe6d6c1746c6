// Makes machines of network namespaces and runs a command, which starts something on one of them by
// `machine0 COMMAND...`, `machine1 COMMAND...`
//
//   on_machines COUNT COMMAND...
//
// Exits with 77 if there can be no machines here.
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "support/machines.h"
#include "support/temporary_directory.h"

namespace {

namespace fs = std::filesystem;
using paceline::test::Machines;

void write_script(const fs::path& path, const std::vector<std::string>& words) {
  {
    std::ofstream script(path);
    script << "#!/bin/sh\nexec";
    for (const std::string& word : words) script << " '" << word << "'";
    script << " \"$@\"\n";
  }
  fs::permissions(path, fs::perms::owner_all);
}

int run_on(int count, char** command) {
  const Machines machines(count);
  const paceline::test::TemporaryDirectory scripts;
  for (int machine = 0; machine < count; ++machine) {
    write_script(scripts.path() / fmt::format("machine{}", machine), machines.on(machine, {}));
  }
  const std::string path = fmt::format("{}:{}", scripts.path().string(), std::getenv("PATH"));
  ::setenv("PATH", path.c_str(), 1);
  pid_t pid = 0;
  if (const int error = ::posix_spawnp(&pid, *command, nullptr, nullptr, command, ::environ)) {
    std::fprintf(stderr, "cannot start %s: %s\n", *command, std::strerror(error));
    return 1;
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace

// NOLINTNEXTLINE(bugprone-exception-escape): it may end by one, as a test
int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  const std::string_view number = argc > 2 ? argv[1] : "";
  int count = 0;
  std::from_chars(number.data(), number.data() + number.size(), count);
  if (count < 1) {
    std::fputs("usage: on_machines COUNT COMMAND...\n", stderr);
    return 2;
  }
  if (const std::string reason = Machines::why_not(); !reason.empty()) {
    std::fprintf(stderr, "%s\n", reason.c_str());
    return kSkipped;
  }
  return run_on(count, argv + 2);
}
