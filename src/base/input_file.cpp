#include "base/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <paceline/error.h>

#include <cerrno>
#include <exception>

#include "base/errno_error.h"

namespace paceline::base {

InputFile::InputFile(const std::filesystem::path& path)
    : path_(path.string()), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) throw errno_error("cannot read " + path_);
  if (!S_ISREG(status.st_mode)) throw Error(path_ + " is not a regular file");
  size_ = static_cast<std::size_t>(status.st_size);
}

void InputFile::read(std::vector<std::uint8_t>& content, std::size_t count) {
  std::size_t have = content.size();
  try {
    content.resize(have + count);
  } catch (const std::exception&) {  // std::bad_alloc or std::length_error
    throw Error(fmt::format("{}: no memory for {} bytes of it", path_, count));
  }
  while (have < content.size()) {
    const ssize_t got = ::read(fd_.get(), content.data() + have, content.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw errno_error("cannot read " + path_);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  content.resize(have);
}

std::vector<std::uint8_t> read_file(const std::filesystem::path& path) {
  InputFile file(path);
  std::vector<std::uint8_t> content;
  file.read(content, file.size());
  return content;
}

}  // namespace paceline::base
