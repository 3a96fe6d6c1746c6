// Threads as /proc shows them. Unwinding another thread's stack needs a signal, which a program may
// use itself, or a debugger.

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include "distributed/debug/handlers.h"

namespace paceline::distributed {
namespace {

namespace fs = std::filesystem;

// Without a newline at its end; empty if it cannot be read: the thread may have ended.
std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

const char* name_of_state(char state) {
  switch (state) {
    case 'R':
      return "runs";
    case 'S':
      return "sleeps";
    case 'D':
      return "waits for a device";
    case 'T':
      return "is stopped";
    case 't':
      return "is stopped by a debugger";
    default:
      return "ends";
  }
}

// "Thread 4711 (progress): sleeps in futex_wait_queue, system call 202".
std::string describe_thread(const fs::path& task) {
  const std::string stat = read_line(task / "stat");
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return "";
  std::string text = fmt::format("Thread {} ({}): {}", task.filename().string(),
                                 read_line(task / "comm"), name_of_state(stat[name_end + 2]));
  const std::string where = read_line(task / "wchan");
  if (!where.empty() && where != "0") text += " in " + where;
  const std::string call = read_line(task / "syscall");
  if (!call.empty() && call != "running") {
    text += ", system call " + call.substr(0, call.find(' '));
  }
  return text + "\n";
}

}  // namespace

std::string describe_threads() {
  std::string text = fmt::format(
      "Process {}: its threads as /proc shows them. For stacks, attach a debugger (gdb -p {}).\n",
      ::getpid(), ::getpid());
  std::error_code error;
  for (fs::directory_iterator task("/proc/self/task", error), end; !error && task != end;
       task.increment(error)) {
    text += describe_thread(task->path());
  }
  return text;
}

}  // namespace paceline::distributed
