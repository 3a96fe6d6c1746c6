#include "base/process_stat.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "base/unique_fd.h"

namespace paceline::base {
namespace {

template <typename Number>
bool take_number(std::string_view& text, Number& number) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return error == std::errc();
}

}  // namespace

// Not through a stream: libstdc++'s throws when the process ends between open and read.
std::string read_stat(int fd) {
  std::string text(1024, '\0');  // some 350 are usual
  const ssize_t size = ::read(fd, text.data(), text.size());
  text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return text;
}

std::optional<ProcessStat> parse_stat(std::string_view stat) {
  ProcessStat process{};
  std::string_view rest = stat;
  if (!take_number(rest, process.pid)) return std::nullopt;
  // "PID (name) state parent group": the name may hold anything, even parentheses and newlines.
  const std::size_t name_end = rest.rfind(')');
  if (name_end == std::string_view::npos || name_end + 3 >= rest.size()) return std::nullopt;
  process.state = rest[name_end + 2];
  rest.remove_prefix(name_end + 3);
  int skipped = 0;  // the session, the terminal and its foreground group
  const bool is_whole = take_number(rest, process.parent) && take_number(rest, process.group) &&
                        take_number(rest, skipped) && take_number(rest, skipped) &&
                        take_number(rest, skipped) && take_number(rest, process.flags);
  return is_whole ? std::optional(process) : std::nullopt;
}

std::optional<ProcessStat> stat_of(pid_t pid) {
  const UniqueFd file(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  return file ? parse_stat(read_stat(file.get())) : std::nullopt;
}

std::string describe_stop(pid_t pid) {
  if (pid <= 0) return "";
  const auto process = stat_of(pid);
  if (!process || (process->state != 'T' && process->state != 't')) return "";
  return fmt::format("its process {} is stopped{}", pid,
                     process->state == 't' ? " by a debugger" : "");
}

}  // namespace paceline::base
