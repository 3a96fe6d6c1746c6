#include "base/process_stat.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>

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

bool skip_numbers(std::string_view& text, int count) {
  long long skipped = 0;
  while (count > 0 && take_number(text, skipped)) --count;
  return count == 0;
}

std::optional<ProcessStat> stat_in(const std::string& directory) {
  const UniqueFd file(::open((directory + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  return file ? parse_stat(read_stat(file.get())) : std::nullopt;
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
  const bool is_whole = take_number(rest, process.parent) && take_number(rest, process.group) &&
                        skip_numbers(rest, 3) && take_number(rest, process.flags) &&
                        skip_numbers(rest, 4) && take_number(rest, process.user_ticks) &&
                        take_number(rest, process.system_ticks);
  return is_whole ? std::optional(process) : std::nullopt;
}

std::optional<ProcessStat> stat_of(pid_t pid) {
  return stat_in(fmt::format("/proc/{}", pid));
}

bool is_asleep(pid_t pid) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (fs::directory_iterator thread(fmt::format("/proc/{}/task", pid), error), end;
       !error && thread != end; thread.increment(error)) {
    const auto stat = stat_in(thread->path());
    if (stat && stat->state != 'S' && stat->state != 'Z') return false;
  }
  return true;
}

std::string describe_stop(pid_t pid) {
  if (pid <= 0) return "";
  const auto process = stat_of(pid);
  if (!process || (process->state != 'T' && process->state != 't')) return "";
  return fmt::format("its process {} is stopped{}", pid,
                     process->state == 't' ? " by a debugger" : "");
}

}  // namespace paceline::base
