#include "train/appended_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "base/errno_error.h"

namespace paceline::train {

AppendedFile::AppendedFile(std::filesystem::path path)
    : path_(std::move(path)),
      fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (!fd_) throw base::errno_error("cannot write to " + path_.string());
}

void AppendedFile::flush() {
  while (!pending_.empty()) {
    const ssize_t written = ::write(fd_.get(), pending_.data(), pending_.size());
    if (written < 0 && errno != EINTR) {
      throw base::errno_error("cannot write to " + path_.string());
    }
    pending_.erase(0, static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
  }
}

}  // namespace paceline::train
