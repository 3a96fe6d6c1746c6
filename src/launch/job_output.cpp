#include "launch/job_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/errno_error.h"
#include "base/pipe.h"
#include "launch/log_directory.h"

namespace paceline::launch {
namespace {

using base::UniqueFd;

// How often a file is looked at for what the console gets of it.
constexpr int kFollowIntervalMs = 100;
// How much of a file that the console does not get may hold its last lines.
constexpr std::size_t kEndOfFile = 65536;

// Whether a file has become shorter than what was read of it, as by `> /dev/stdout` in a shell.
bool is_truncated(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && info.st_size < ::lseek(fd, 0, SEEK_CUR);
}

}  // namespace

Destination JobOutput::destination(int rank, Stream stream) const {
  if (spec_.destinations.empty()) return Destination::console;
  return spec_.destinations[static_cast<std::size_t>(rank)][static_cast<std::size_t>(stream)];
}

std::filesystem::path JobOutput::log_file(int rank, Stream stream) const {
  return directory_ / std::to_string(rank) / (stream == Stream::out ? "stdout.log" : "stderr.log");
}

UniqueFd JobOutput::open(int rank, Stream stream) {
  const Destination where = destination(rank, stream);
  if (where == Destination::console) return open_pipe(rank, stream);
  const auto path = log_file(rank, stream);
  UniqueFd file = make_log_file(path);
  if (where == Destination::file_and_console) {
    UniqueFd reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!reader) throw base::errno_error(fmt::format("cannot read {}", path.string()));
    sources_.push_back({rank, stream, std::move(reader), true});
  }
  return file;
}

UniqueFd JobOutput::open_pipe(int rank, Stream stream) {
  base::Pipe pipe = base::make_pipe();
  if (::fcntl(pipe.read_end.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw base::errno_error("cannot make a pipe non-blocking");
  }
  sources_.push_back({rank, stream, std::move(pipe.read_end), false});
  return std::move(pipe.write_end);
}

// A file would count as readable at its end too.
int JobOutput::prepare_poll(std::vector<pollfd>& fds) const {
  for (const Source& source : sources_) {
    fds.push_back({source.is_file ? -1 : source.fd.get(), POLLIN, 0});
  }
  if (file_has_more_) return 0;
  return std::ranges::any_of(sources_, &Source::is_file) ? kFollowIntervalMs : -1;
}

void JobOutput::read_ready(std::span<const pollfd> fds) {
  file_has_more_ = false;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].is_file) {
      file_has_more_ |= read_some(sources_[i]);
    } else if (fds[i].revents != 0) {
      read_some(sources_[i]);
    }
  }
}

void JobOutput::read_pipes() {
  for (Source& source : sources_) {
    while (!source.is_file && read_some(source)) {
    }
  }
}

bool JobOutput::read_files() {
  return std::ranges::any_of(
      sources_, [this](Source& source) { return source.is_file && read_some(source); });
}

// False if there is nothing to read now; closes a pipe at its end.
bool JobOutput::read_some(Source& source) {
  std::array<char, 65536> buffer;
  ssize_t size = ::read(source.fd.get(), buffer.data(), buffer.size());
  if (size == 0 && source.is_file && is_truncated(source.fd.get())) {
    ::lseek(source.fd.get(), 0, SEEK_SET);
    size = ::read(source.fd.get(), buffer.data(), buffer.size());
  }
  if (size == 0 && !source.is_file) source.fd.reset();
  if (size <= 0) return false;
  const std::string_view bytes(buffer.data(), static_cast<std::size_t>(size));
  source.in_line = bytes.back() != '\n';
  last_lines_[static_cast<std::size_t>(source.rank)].feed(source.stream, bytes);
  if (spec_.output) spec_.output(source.rank, source.stream, bytes);
  return true;
}

void JobOutput::begin_process(int rank) {
  constexpr int kMostReads = 16;  // the new process may write already
  for (Source& source : sources_) {
    if (source.rank != rank) continue;
    for (int i = 0; i < kMostReads && read_some(source); ++i) {
    }
    if (std::exchange(source.in_line, false) && spec_.output) {
      spec_.output(rank, source.stream, "\n");
    }
  }
  last_lines_[static_cast<std::size_t>(rank)] = {};
  std::error_code ignored;
  for (const Stream stream : {Stream::out, Stream::err}) {
    const auto file = log_file(rank, stream);
    if (destination(rank, stream) == Destination::file) {
      begins_[file] = std::filesystem::file_size(file, ignored);
    }
  }
}

std::vector<std::string> JobOutput::last_lines(int rank) const {
  TailBuffer lines = last_lines_[static_cast<std::size_t>(rank)];
  for (const Stream stream : {Stream::out, Stream::err}) {
    if (destination(rank, stream) != Destination::file) continue;
    const auto file = log_file(rank, stream);
    const auto begin = begins_.find(file);
    lines.feed(stream, read_end(file, kEndOfFile, begin == begins_.end() ? 0 : begin->second));
  }
  return lines.lines();
}

}  // namespace paceline::launch
