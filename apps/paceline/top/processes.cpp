#include "top/processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <pwd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "base/utf8.h"
#include "launch/process_tree.h"

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

std::string program_of(pid_t process) {
  std::string name;
  std::ifstream file(proc(process, "comm"));
  std::getline(file, name);
  return printable(name);
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

std::optional<LiveProcess> look_into(pid_t process) {
  base::UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  try {
    auto reader = pidfd ? reader_of(process) : nullptr;
    const auto place = reader ? reader->place() : std::nullopt;
    if (!place) return std::nullopt;
    return LiveProcess{process, std::move(pidfd), std::move(reader), *place};
  } catch (const Error& error) {
    throw Error(fmt::format("process {}: {}", process, error.what()));
  }
}

// Processes that this user may not look into, and those of other versions, do not count.
std::vector<LiveProcess> all_live_processes() {
  std::vector<LiveProcess> found;
  std::error_code error;
  for (fs::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.find_first_not_of("0123456789") != name.npos) continue;
    try {
      auto process = look_into(std::stoi(name));
      if (process && !process->has_ended()) found.push_back(std::move(*process));
    } catch (const std::exception&) {
      continue;
    }
  }
  return found;
}

bool is_this_users(const LiveProcess& process) {
  struct stat status {};
  return ::stat(proc(process.pid, "").c_str(), &status) == 0 && status.st_uid == ::geteuid();
}

[[noreturn]] void throw_unreadable(pid_t process, const std::error_code& code) {
  struct stat status {};
  const bool known = ::stat(proc(process, "").c_str(), &status) == 0;
  const passwd* const user = known ? ::getpwuid(status.st_uid) : nullptr;
  const std::string owner = user != nullptr ? user->pw_name
                            : known         ? std::to_string(status.st_uid)
                                            : "unknown";
  throw Error(fmt::format("cannot look into process {} of user {}: {}; only that user and root may",
                          process, owner, code.message()));
}

// A rank, or what may become one or start ones.
bool may_train(pid_t process) {
  const std::string variables = '\0' + content_of(proc(process, "environ"));
  if (variables.find(std::string("\0TORCHELASTIC_RUN_ID=", 21)) != variables.npos) return true;
  std::error_code error;
  const fs::path program = fs::read_symlink(proc(process, "exe"), error);
  const std::string arguments = content_of(proc(process, "cmdline"));
  const bool is_viewer = arguments.find(std::string("\0top", 4)) != arguments.npos;
  return (program.filename() == "paceline" && !is_viewer) ||
         content_of(proc(process, "maps")).find("/libtorch_cpu.so") != std::string::npos;
}

std::string describe(const std::vector<LiveProcess>& ranks) {
  const LiveProcess& first = ranks.front();
  const std::string name = printable(first.reader->job());
  return fmt::format("  {}process {} ({}), rank {} of {}",
                     name.empty() ? "" : fmt::format("--job {}: ", name), first.pid,
                     program_of(first.pid), first.place.rank, first.place.size);
}

std::vector<std::vector<LiveProcess>> divide(std::vector<LiveProcess> processes) {
  std::vector<std::vector<LiveProcess>> jobs;
  for (LiveProcess& one : processes) {
    const auto job = std::ranges::find_if(
        jobs, [&](const auto& ranks) { return key_of(ranks.front()) == key_of(one); });
    auto& ranks = job == jobs.end() ? jobs.emplace_back() : *job;
    ranks.push_back(std::move(one));
  }
  return jobs;
}

JobKey only_job(std::vector<LiveProcess> processes, std::string_view which) {
  const auto jobs = divide(std::move(processes));
  if (jobs.size() == 1) return key_of(jobs.front().front());
  std::vector<std::string> lines;
  for (const auto& ranks : jobs) lines.push_back(describe(ranks));
  throw UsageError(fmt::format("{} jobs {}; name one by a process{}:\n{}", jobs.size(), which,
                               which == "train" ? " or by --job" : "", fmt::join(lines, "\n")));
}

std::optional<JobKey> job_of_process(pid_t process) {
  std::error_code error;
  if (!fs::exists(proc(process, ""), error)) {
    throw UsageError(fmt::format("there is no process {}", process));
  }
  std::vector<LiveProcess> found;
  bool trains = false;
  try {
    if (auto one = look_into(process)) return key_of(*one);
    trains = may_train(process);
  } catch (const fs::filesystem_error& refused) {
    throw_unreadable(process, refused.code());
  }
  for (const auto& child : launch::descendants(process)) {
    trains = trains || may_train(child.pid);
    try {
      if (auto one = look_into(child.pid)) found.push_back(std::move(*one));
    } catch (const fs::filesystem_error&) {
      continue;
    }
  }
  if (!found.empty()) return only_job(std::move(found), "were started by this process");
  if (trains) return std::nullopt;
  throw UsageError(fmt::format(
      "process {} ({}) does not train: neither it nor a process that it started has loaded "
      "LibTorch. Name a rank, or its launcher",
      process, program_of(process)));
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

JobKey key_of(const LiveProcess& process) {
  const int size = process.place.size;
  return {process.reader->job(), process.reader->port(), size, size == 1 ? process.pid : 0};
}

std::vector<LiveProcess> ranks_of(const JobKey& job) {
  auto ranks = all_live_processes();
  std::erase_if(ranks, [&](const LiveProcess& one) { return key_of(one) != job; });
  std::ranges::sort(ranks, {}, [](const LiveProcess& one) { return one.place.rank; });
  return ranks;
}

std::optional<JobKey> find_job(const Target& target) {
  if (target.process) return job_of_process(last_number(*target.process, "Tgid:"));
  auto all = all_live_processes();
  if (target.job) {
    std::vector<LiveProcess> named;
    for (LiveProcess& one : all) {
      if (one.reader->job() == *target.job) named.push_back(std::move(one));
    }
    if (!named.empty()) return only_job(std::move(named), "have this name");
    throw UsageError(fmt::format(
        "no job that trains on this machine has the name {}; a launcher gives it (--rdzv-id)",
        *target.job));
  }
  std::erase_if(all, [](const LiveProcess& one) { return !is_this_users(one); });
  if (!all.empty()) return only_job(std::move(all), "train");
  throw UsageError(
      "no process of this user trains with DistributedDataParallel on this machine. To wait for "
      "one, name its process or its launcher's");
}

std::string printable(const std::string& text) {
  std::string result = text;
  const bool valid = base::is_utf8(text);
  unsigned char before = 0;
  for (char& c : result) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_c1 = before == 0xc2 && byte < 0xa0;  // control characters beyond ASCII
    before = byte;
    if (is_c1) (&c)[-1] = '?';
    if (byte < 0x20 || byte == 0x7f || is_c1 || (byte >= 0x80 && !valid)) c = '?';
  }
  return result;
}

}  // namespace paceline::top
