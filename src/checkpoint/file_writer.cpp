#include "checkpoint/file_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <utility>

#include "base/errno_error.h"

namespace paceline::checkpoint {
namespace {

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

}  // namespace

FileWriter::FileWriter(std::filesystem::path path) : path_(std::move(path)) {
  std::random_device random;
  // Not mkstemp: the file is to have the permissions that others of this process have.
  do {
    temporary_ =
        directory_of(path_) / fmt::format(".{}.{:08x}", path_.filename().string(), random());
    file_ =
        base::UniqueFd(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  } while (!file_ && errno == EEXIST);
  if (!file_) fail();
}

FileWriter::~FileWriter() {
  if (file_) ::unlink(temporary_.c_str());
}

void FileWriter::write(std::string_view bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 30;  // of one call; Linux writes less than 2 GiB
  while (!bytes.empty()) {
    const ssize_t size = ::write(file_.get(), bytes.data(), std::min(bytes.size(), kMost));
    if (size < 0 && errno != EINTR) fail();
    if (size > 0) bytes.remove_prefix(static_cast<std::size_t>(size));
  }
}

void FileWriter::commit() {
  if (::fsync(file_.get()) != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
  file_.reset();
  const base::UniqueFd directory(
      ::open(directory_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0) fail();
}

void FileWriter::fail() const {
  throw base::errno_error(fmt::format("cannot write {}", path_.string()));
}

}  // namespace paceline::checkpoint
