#include "launcher.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace paceline::test {

void Launcher::TearDown() {
  EXPECT_THAT(left_behind(), ::testing::IsEmpty()) << "in the directory for temporary files";
}

ChildProcess Launcher::run(int ranks, const std::string& script, std::vector<std::string> flags,
                           Environment environment, base::Pipe out, bool err_too) {
  std::vector<std::string> command{PACELINE_COMMAND, "run", "--nproc-per-node",
                                   std::to_string(ranks)};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {"sh", "-c", script});
  environment.emplace_back("TMPDIR", temporary_.path().string());
  return ChildProcess(std::move(command), environment, std::move(out), err_too);
}

ChildProcess Launcher::paceline(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), PACELINE_COMMAND);
  return ChildProcess(std::move(arguments));
}

std::vector<std::string> Launcher::left_behind() const {
  std::vector<std::string> names;
  const auto look = [&] {
    names.clear();
    for (const auto& entry : std::filesystem::directory_iterator(temporary_.path())) {
      names.push_back(entry.path().filename().string());
    }
    return names.empty();
  };
  eventually(look);
  return names;
}

pid_t guard_of(const ChildProcess& job) {
  const pid_t supervisor = pids_after(job.out(), "supervisor").at(0);
  std::ifstream file("/proc/" + std::to_string(supervisor) + "/status");
  for (std::string word; file >> word;) {
    pid_t parent = 0;
    if (word == "PPid:" && file >> parent) return parent;
  }
  throw std::runtime_error("the supervisor has ended");
}

std::ptrdiff_t read_lines(int fd, std::ptrdiff_t enough) {
  std::ptrdiff_t lines = 0;
  std::string buffer(65536, '\0');
  while (lines < enough) {
    pollfd readable{fd, POLLIN, 0};
    const bool waited = ::poll(&readable, 1, 60000) == 0;
    EXPECT_FALSE(waited) << "after " << lines << " lines";
    const ssize_t size = waited ? 0 : ::read(fd, buffer.data(), buffer.size());
    if (size <= 0) break;
    lines += std::count(buffer.begin(), buffer.begin() + size, '\n');
  }
  return lines;
}

}  // namespace paceline::test
