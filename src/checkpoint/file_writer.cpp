#include "checkpoint/file_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/errno_error.h"

namespace paceline::checkpoint {
namespace {

// Of the file's name, in that of its temporary file: file systems take 255 bytes.
constexpr std::size_t kMostOfName = 200;

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

// The file that a symbolic link names is replaced, not the link.
std::filesystem::path follow_links(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  std::error_code error;
  for (int links = 0; links < kMostLinks && std::filesystem::is_symlink(path, error); ++links) {
    path = directory_of(path) / std::filesystem::read_symlink(path, error);
  }
  return path;
}

}  // namespace

FileWriter::FileWriter(std::filesystem::path path, const Options& options)
    : path_(follow_links(std::move(path))), options_(options) {
  struct ::stat earlier {};
  const bool exists = ::stat(path_.c_str(), &earlier) == 0;
  // The rename below would replace a device, or a pipe that others have open.
  if (exists && !S_ISREG(earlier.st_mode)) {
    throw Error(fmt::format("cannot write {}: it is not a regular file", path_.string()));
  }
  std::random_device random;
  const std::string name = path_.filename().string().substr(0, kMostOfName);
  // Not mkstemp: the file is to have the permissions that others of this process have.
  do {
    temporary_ = directory_of(path_) / fmt::format(".{}.{:08x}", name, random());
    file_ =
        base::UniqueFd(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  } while (!file_ && errno == EEXIST);
  if (!file_) fail();
  // Some file systems have no permissions to set.
  if (exists) std::ignore = ::fchmod(file_.get(), earlier.st_mode & 0777);
}

FileWriter::~FileWriter() {
  if (file_) ::unlink(temporary_.c_str());
}

void FileWriter::write(std::string_view bytes) {
  constexpr std::size_t kBuffer = std::size_t{1} << 16;
  size_ += bytes.size();
  if (options_.checksum) crc32_ = crc32_of(bytes, crc32_);
  if (bytes.size() < kBuffer) {
    buffer_ += bytes;
    if (buffer_.size() >= kBuffer) flush();
  } else {
    flush();
    write_out(bytes);
  }
}

void FileWriter::flush() {
  if (!buffer_.empty()) write_out(buffer_);
  buffer_.clear();
}

void FileWriter::write_out(std::string_view bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 30;  // of one call; Linux writes less than 2 GiB
  // When a file replaces another, ext4 first writes its data to the disk, which takes twice as long
  // as the write here, unless blocks were allocated for all of it. Other file systems may refuse
  // to; and whether there is space, write reports.
  can_allocate_ =
      can_allocate_ && ::fallocate(file_.get(), FALLOC_FL_KEEP_SIZE, static_cast<::off_t>(written_),
                                   static_cast<::off_t>(bytes.size())) == 0;
  written_ += bytes.size();
  while (!bytes.empty()) {
    const ssize_t size = ::write(file_.get(), bytes.data(), std::min(bytes.size(), kMost));
    if (size < 0 && errno != EINTR) fail();
    if (size > 0) bytes.remove_prefix(static_cast<std::size_t>(size));
  }
}

void FileWriter::commit() {
  flush();
  if (options_.fsync && ::fsync(file_.get()) != 0) fail();
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
  file_.reset();
  if (options_.fsync) sync_directory(directory_of(path_));
}

void FileWriter::fail() const {
  throw base::errno_error(fmt::format("cannot write {}", path_.string()));
}

void sync_directory(const std::filesystem::path& path) {
  const base::UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0) {
    throw base::errno_error(fmt::format("cannot write the directory {}", path.string()));
  }
}

void create_directories(const std::filesystem::path& directory, bool fsync) {
  std::vector<std::filesystem::path> parents;  // of what is new
  std::filesystem::path path = std::filesystem::absolute(directory);
  for (; !std::filesystem::exists(path); path = path.parent_path())
    parents.push_back(path.parent_path());
  std::filesystem::create_directories(directory);
  if (!fsync) return;
  for (const std::filesystem::path& parent : parents) sync_directory(parent);
}

std::uint32_t crc32_of(std::string_view bytes, std::uint32_t crc32) {
  return static_cast<std::uint32_t>(
      ::crc32_z(crc32, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace paceline::checkpoint
