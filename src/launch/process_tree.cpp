#include "launch/process_tree.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/unique_fd.h"

namespace paceline::launch {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

std::multimap<pid_t, Process> processes_by_parent() {
  std::multimap<pid_t, Process> processes;
  if (!sees_processes()) return processes;
  std::error_code error;
  for (fs::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const base::UniqueFd file(::open((entry->path() / "stat").c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) continue;  // it has just ended
    const auto process = base::parse_stat(base::read_stat(file.get()));
    if (process) processes.emplace(process->parent, *process);
  }
  return processes;
}

}  // namespace

bool sees_processes() {
  std::error_code ignored;
  return fs::read_symlink("/proc/self", ignored) == std::to_string(::getpid());
}

std::vector<Process> descendants(pid_t root) {
  auto processes = processes_by_parent();
  std::vector<Process> found;
  const auto add_children = [&](pid_t parent) {
    const auto [begin, end] = processes.equal_range(parent);
    for (auto child = begin; child != end; ++child) found.push_back(child->second);
    processes.erase(begin, end);  // no snapshot: a number used twice must not make a cycle
  };
  add_children(root);
  for (std::size_t i = 0; i < found.size(); ++i) add_children(found[i].pid);
  return found;
}

void kill_descendants(pid_t spared) {
  const auto deadline = base::Deadline::after(5s);
  const auto others = [&] {
    auto found = descendants(::getpid());
    std::erase_if(found, [&](const Process& process) { return process.pid == spared; });
    return found;
  };
  for (auto left = others(); !left.empty() && !deadline.expired(); left = others()) {
    for (const Process& process : left) ::kill(process.pid, SIGKILL);
    std::this_thread::sleep_for(1ms);
    for (const Process& process : left) ::waitpid(process.pid, nullptr, WNOHANG);
  }
}

}  // namespace paceline::launch
