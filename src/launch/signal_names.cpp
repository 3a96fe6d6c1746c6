#include "launch/signal_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <iterator>

#include <paceline/error.h>

#include "base/parse.h"

namespace paceline::launch {

std::string signal_name(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

std::vector<int> parse_signals(const std::string& list, std::string_view source) {
  constexpr int kAllowed[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};
  std::vector<int> signals;
  if (list.empty()) return signals;
  for (std::string_view name : base::split_at_commas(list)) {
    name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
    name = name.substr(0, name.find_last_not_of(' ') + 1);
    const auto found = std::ranges::find(kAllowed, name, signal_name);
    if (found == std::end(kAllowed)) {
      throw UsageError(
          fmt::format("{} {}: '{}' is none of SIGTERM, SIGINT, SIGHUP, SIGQUIT, "
                      "SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU",
                      source, list, name));
    }
    signals.push_back(*found);
  }
  return signals;
}

std::string_view signal_meaning(int signal) {
  switch (signal) {
    case SIGKILL:
      return "often the kernel's out-of-memory killer";
    case SIGSEGV:
      return "an invalid memory access";
    case SIGBUS:
      return "inaccessible memory: often a full /dev/shm, or a mapped file that was truncated";
    case SIGABRT:
      return "an uncaught exception, a failed assertion or a corrupted heap";
    case SIGFPE:
      return "usually an integer division by zero";
    case SIGILL:
      return "usually an instruction that this processor lacks";
    case SIGTRAP:
      return "a breakpoint or a failed check";
    case SIGSYS:
      return "a system call that a sandbox forbids";
    case SIGPIPE:
      return "it wrote to a pipe or socket that nobody reads";
    case SIGXCPU:
      return "the limit on CPU time";
    case SIGXFSZ:
      return "the limit on the size of a file";
    case SIGTERM:
      return "something outside asked it to stop";
    case SIGINT:
      return "Ctrl-C";
    case SIGHUP:
      return "its terminal was closed";
    default:
      return "";
  }
}

}  // namespace paceline::launch
