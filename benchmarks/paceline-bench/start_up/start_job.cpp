#include "start_up/start_job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "launch/report.h"
#include "measure/clock.h"
#include "measure/external_peer.h"

namespace paceline::bench {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPythonRank =
    "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); "
    "d.destroy_process_group()";

struct Launcher {
  std::string implementation;
  std::string variant;
  std::vector<std::string> command;
};

double microseconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_usec);
}

// Its output goes to standard error.
Sample run_once(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  const double begin = now_us(CLOCK_MONOTONIC);
  pid_t pid = -1;
  const int error =
      ::posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), ::environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw base::errno_error(fmt::format("cannot start {}", command[0]), error);
  int status = 0;
  rusage usage{};
  while (::wait4(pid, &status, 0, &usage) < 0 && errno == EINTR) {
  }
  const double end = now_us(CLOCK_MONOTONIC);
  if (status != 0) {
    throw Error(fmt::format("'{}' {}", fmt::join(command, " "), launch::describe_end(status)));
  }
  return {end - begin, microseconds(usage.ru_utime) + microseconds(usage.ru_stime)};
}

// The command that started this program, or the one that is installed with it.
std::string paceline_command() {
  const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
  for (const fs::path& path :
       {here / "paceline", here.parent_path().parent_path() / "bin/paceline"}) {
    if (fs::exists(path)) return path;
  }
  throw Error(fmt::format("no command paceline in {}", here.string()));
}

std::vector<Launcher> launchers(int ranks, const std::string& python) {
  const std::string self = fs::read_symlink("/proc/self/exe");
  const std::string count = fmt::format("--nproc-per-node={}", ranks);
  const std::vector<std::string> worker{self, "--worker", "launch",
                                        fmt::format("--ranks={}", ranks)};
  std::vector<Launcher> all{{"paceline", "", {paceline_command(), "run", count}}};
  all[0].command.insert(all[0].command.end(), worker.begin(), worker.end());
  if (python.empty()) return all;
  const std::vector<std::string> torchrun{python,         "-m",  "torch.distributed.run",
                                          "--standalone", count, "--no-python"};
  all.push_back({"torchrun", "", torchrun});
  all[1].command.insert(all[1].command.end(), worker.begin(), worker.end());
  all.push_back({"torchrun", "python", torchrun});
  all[2].command.insert(all[2].command.end(), {python, "-c", kPythonRank});
  return all;
}

}  // namespace

Result measure_launch(int ranks, int rounds, const std::string& python) {
  Result result{"launch", ranks, "whole job", {}};
  const std::vector<Launcher> all = launchers(ranks, python);
  for (const Launcher& one : all) {
    run_once(one.command);  // files are in memory then
    result.series.push_back({one.implementation, one.variant, {}, {}});
  }
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t turn = 0; turn < all.size(); ++turn) {
      const std::size_t index = (turn + static_cast<std::size_t>(round)) % all.size();
      const Sample sample = run_once(all[index].command);
      result.series[index].wall_us.push_back(sample.wall_us);
      result.series[index].cpu_us.push_back(sample.cpu_us);
    }
  }
  return result;
}

}  // namespace paceline::bench
