#include "top/processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/open_pidfd.h"
#include "base/printable.h"

namespace paceline::top {
namespace {

namespace fs = std::filesystem;

fs::path proc(pid_t process, const char* name) {
  return fs::path("/proc") / std::to_string(process) / name;
}

std::string content_of(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

// The last number of a line of its status: "NSpid:" is its id as itself sees it, which is another
// one in a container; "Tgid:" is the process of a thread.
pid_t last_number(pid_t process, std::string_view label) {
  pid_t last = process;
  std::ifstream file(proc(process, "status"));
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(label)) continue;
    std::istringstream numbers(line.substr(label.size()));
    for (pid_t number = 0; numbers >> number;) last = number;
  }
  return last;
}

// Of this machine, as far as they are visible.
std::vector<pid_t> all_processes() {
  std::vector<pid_t> found;
  std::error_code error;
  for (fs::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    pid_t number = 0;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), number);
    if (read.ec == std::errc() && read.ptr == name.data() + name.size()) found.push_back(number);
  }
  return found;
}

// Each begins with a NUL. Empty if this user may not look.
std::string variables_of(pid_t process) {
  return '\0' + content_of(proc(process, "environ"));
}

std::string job_variable() {
  return '\0' + std::string("TORCHELASTIC_RUN_ID=");
}

std::string owner_of(pid_t process) {
  struct stat status {};
  if (::stat(proc(process, "").c_str(), &status) != 0) return "unknown";
  const passwd* const user = ::getpwuid(status.st_uid);
  return user != nullptr ? user->pw_name : std::to_string(status.st_uid);
}

// The memory that a process shows, or null. A child that it has forked has it open too. Throws
// filesystem_error if this user may not look, Error if it is that of another version.
std::shared_ptr<LiveReader> reader_of(pid_t process) {
  std::error_code error;
  const fs::path target = fmt::format("/memfd:{} (deleted)", trace::kLiveName);
  for (fs::directory_iterator entry(proc(process, "fd"), error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code gone;
    if (fs::read_symlink(entry->path(), gone) != target) continue;
    const base::UniqueFd fd(::open(entry->path().c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
    const bool is_complete = fd && (::fcntl(fd.get(), F_GET_SEALS) & F_SEAL_SHRINK) != 0;
    if (!is_complete) continue;
    auto reader = std::make_shared<LiveReader>(fd.get());
    if (reader->process() == last_number(process, "NSpid:")) return reader;
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw fs::filesystem_error("", error);
  }
  return nullptr;
}

}  // namespace

bool LiveProcess::has_ended() const {
  pollfd end{pidfd.get(), POLLIN, 0};
  return ::poll(&end, 1, 0) != 0;
}

bool LiveProcess::has_place() const {
  const auto now = reader->place();
  return now && now->rank == place.rank && now->size == place.size;
}

bool LiveProcess::is_this_users() const {
  struct stat status {};
  return ::stat(proc(pid, "").c_str(), &status) == 0 && status.st_uid == ::geteuid();
}

std::optional<LiveProcess> look_into(pid_t process) {
  base::UniqueFd pidfd = base::open_pidfd(process);
  try {
    auto reader = pidfd ? reader_of(process) : nullptr;
    const auto place = reader ? reader->place() : std::nullopt;
    if (!place) return std::nullopt;
    return LiveProcess{process, std::move(pidfd), std::move(reader), *place};
  } catch (const fs::filesystem_error& error) {
    throw Error(
        fmt::format("cannot look into process {} of user {}: {}; only that user and root may",
                    process, owner_of(process), error.code().message()));
  } catch (const Error& error) {
    throw Error(fmt::format("process {}: {}", process, error.what()));
  }
}

std::vector<LiveProcess> all_live_processes() {
  std::vector<LiveProcess> found;
  for (const pid_t number : all_processes()) {
    try {
      auto process = look_into(number);
      if (process && !process->has_ended()) found.push_back(std::move(*process));
    } catch (const std::exception&) {
      continue;
    }
  }
  return found;
}

bool may_train(pid_t process) {
  if (variables_of(process).find(job_variable()) != std::string::npos) return true;
  std::error_code error;
  const fs::path program = fs::read_symlink(proc(process, "exe"), error);
  const std::string arguments = content_of(proc(process, "cmdline"));
  const bool is_viewer = arguments.find(std::string("\0top\0", 5)) != arguments.npos;
  return (program.filename() == "paceline" && !is_viewer) ||
         content_of(proc(process, "maps")).find("/libtorch_cpu.so") != std::string::npos;
}

bool is_started(const std::string& job) {
  const std::string variable = job_variable() + job + '\0';
  return std::ranges::any_of(all_processes(), [&](pid_t process) {
    return process != ::getpid() && variables_of(process).find(variable) != std::string::npos;
  });
}

std::optional<pid_t> process_of(pid_t thread) {
  std::error_code error;
  if (!fs::exists(proc(thread, ""), error)) return std::nullopt;
  return last_number(thread, "Tgid:");
}

std::string program_of(pid_t process) {
  std::string name;
  std::ifstream file(proc(process, "comm"));
  std::getline(file, name);
  return base::printable_line(name);
}

}  // namespace paceline::top
