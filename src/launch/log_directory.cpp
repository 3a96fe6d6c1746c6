#include "launch/log_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/errno_error.h"

namespace paceline::launch {
namespace {

namespace fs = std::filesystem;

// With random characters after `start`.
fs::path make_unique_directory(const fs::path& start) {
  std::string name = start.string() + "XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    throw base::errno_error(fmt::format("cannot make the directory {}", name));
  }
  return name;
}

fs::path temporary_start() {
  std::error_code error;
  // Absolute, as the program may change its directory.
  const fs::path parent = fs::absolute(fs::temp_directory_path(error), error);
  return (error ? fs::path("/tmp") : parent) / "paceline-";
}

}  // namespace

void make_directories(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    throw base::errno_error(fmt::format("cannot make the directory {}", path.string()),
                            error.value());
  }
}

fs::path make_run_directory(const fs::path& start) {
  std::error_code error;
  const fs::path absolute = fs::absolute(start, error);
  if (error) {
    throw base::errno_error(
        fmt::format("cannot make the directory {} in the current one", start.string()),
        error.value());
  }
  make_directories(absolute.parent_path());
  fs::path directory = make_unique_directory(absolute);
  try {
    check_writable(directory);
  } catch (...) {
    std::error_code ignored;
    fs::remove(directory, ignored);
    throw;
  }
  return directory;
}

// By a write, which a quota may forbid too.
void check_writable(const fs::path& directory) {
  std::string name = directory / "XXXXXX";
  const base::UniqueFd file(::mkostemp(name.data(), O_CLOEXEC));
  constexpr std::array<char, 4096> kBlock{};
  const bool is_written = file && ::write(file.get(), kBlock.data(), kBlock.size()) > 0;
  const int code = errno;
  if (file) ::unlink(name.c_str());
  if (!is_written) {
    throw base::errno_error(fmt::format("cannot write logs in {}", directory.string()), code);
  }
}

JobDirectory::JobDirectory(const fs::path& kept, int ranks)
    : path_(kept), is_temporary_(kept.empty()) {
  try {
    if (is_temporary_) path_ = make_unique_directory(temporary_start());
    for (int rank = 0; rank < ranks; ++rank) make_directories(path_ / std::to_string(rank));
  } catch (const Error& error) {
    if (!is_temporary_) throw;
    remove();
    path_.clear();
    problem_ = error.what();
  }
}

JobDirectory::~JobDirectory() {
  remove();
}

void JobDirectory::remove() {
  std::error_code ignored;
  if (is_temporary_ && !path_.empty()) fs::remove_all(path_, ignored);
}

base::UniqueFd make_log_file(const fs::path& path) {
  base::UniqueFd file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666));
  if (!file) throw base::errno_error(fmt::format("cannot make the log file {}", path.string()));
  return file;
}

std::string read_end(const fs::path& path, std::size_t size, std::uintmax_t begin) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto length =
      static_cast<std::streamoff>(file.tellg()) - static_cast<std::streamoff>(begin);
  if (length <= 0) return "";
  std::string text(std::min(size, static_cast<std::size_t>(length)), '\0');
  file.seekg(-static_cast<std::streamoff>(text.size()), std::ios::end);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

}  // namespace paceline::launch
