#include "trace/trace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "base/errno_error.h"
#include "base/log.h"
#include "trace/format.h"

namespace paceline::trace {
namespace {

constexpr std::size_t kChunk = 1 << 16;
// Attempts to replace a file that other processes replace at the same time.
constexpr int kAttempts = 10;

// Makes a new file even if there is one: a process of another job may still write into that. It
// writes into what is there if that is no regular file, such as a symbolic link, or if it may not
// be removed.
base::UniqueFd open_new(const std::filesystem::path& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_CLOEXEC;
  for (int i = 0; i < kAttempts; ++i) {
    struct stat status {};
    const bool exists = ::lstat(path.c_str(), &status) == 0;
    if (exists && (!S_ISREG(status.st_mode) || ::unlink(path.c_str()) != 0)) break;
    base::UniqueFd fd(::open(path.c_str(), kFlags | O_EXCL, 0666));
    if (fd || errno != EEXIST) return fd;
  }
  return base::UniqueFd(::open(path.c_str(), kFlags | O_TRUNC, 0666));
}

}  // namespace

TraceFile::TraceFile(std::filesystem::path path, int rank, std::size_t max_bytes)
    : path_(std::move(path)), rank_(rank), fd_(open_new(path_)), max_bytes_(max_bytes) {
  if (!fd_) throw base::errno_error("cannot write " + path_.string());
}

void TraceFile::write(std::string_view events) {
  if (events.empty()) return;
  append(events);
  flush();
}

void TraceFile::write(std::span<const Span> spans) {
  for (const Span& span : spans) {
    if (!fd_) return;
    if (models_.insert(span.model).second) append(model_event(rank_, span.model));
    if (is_on_device(span.kind) && models_on_devices_.insert(span.model).second) {
      append(device_event(rank_, span.model));
    }
    append_span(text_, rank_, span);
    if (text_.size() >= kChunk) flush();
  }
  flush();
}

void TraceFile::write(std::span<const ThreadUse> samples) {
  if (!fd_) return;
  for (const ThreadUse& sample : samples) append_thread_event(text_, rank_, sample);
  flush();
}

void TraceFile::close() {
  if (!fd_) return;
  text_ += "\n]\n";
  max_bytes_ = std::numeric_limits<std::size_t>::max();
  flush();
  fd_.reset();
}

void TraceFile::append(std::string_view events) {
  // The first event has no comma before it.
  if (written_ == 0 && text_.empty()) {
    text_ = '[';
    events.remove_prefix(1);
  }
  text_ += events;
}

void TraceFile::flush() {
  std::string_view rest = text_;
  while (fd_ && !rest.empty()) {
    const ssize_t count = ::write(fd_.get(), rest.data(), rest.size());
    if (count > 0) {
      rest.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno != EINTR) {
      const Error error = base::errno_error("cannot write the timeline " + path_.string());
      base::log(LogLevel::error, "{}; it ends here", error.what());
      fd_.reset();
    }
  }
  written_ += text_.size();
  text_.clear();
  if (!fd_ || written_ < max_bytes_) return;
  base::log(LogLevel::warning, "the timeline {} reached its limit of {} MiB and ends here",
            path_.string(), max_bytes_ >> 20);
  text_ = full_event(rank_);
  close();
}

}  // namespace paceline::trace
