#include "distributed/rendezvous/file_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/errno_error.h"
#include "base/parse.h"
#include "base/unique_fd.h"

namespace paceline::distributed {
namespace {

// The format of c10d::FileStore: alternating keys and values, each after its length; the first key
// counts the stores. A later value of a key replaces an earlier one.
constexpr std::string_view kStores = "refcount/";
constexpr std::string_view kStoresThatEnded = "cleanup/";

// Calls `field(is_key, offset, length)` for each key and value, until it returns false. Returns
// whether the file ends with a whole value then.
template <typename Field>
bool read_fields(int fd, Field field) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return false;
  off_t at = 0;
  bool is_key = true;
  for (std::uint32_t length = 0; at < status.st_size; is_key = !is_key) {
    if (::pread(fd, &length, sizeof(length), at) != sizeof(length)) return false;
    at += static_cast<off_t>(sizeof(length));
    if (!field(is_key, at, length)) return false;
    at += static_cast<off_t>(length);
  }
  return at == status.st_size && is_key;
}

bool is_at(int fd, off_t offset, std::uint32_t length, std::string_view text) {
  std::array<char, 16> found{};
  return length == text.size() && ::pread(fd, found.data(), length, offset) == length &&
         std::string_view(found.data(), length) == text;
}

// FileStore would read other files for ever, or until memory runs out.
bool holds_store(int fd) {
  bool is_first = true;
  return read_fields(fd, [&](bool, off_t offset, std::uint32_t length) {
    return !std::exchange(is_first, false) || is_at(fd, offset, length, kStores);
  });
}

// The number that a key has, if it has one.
std::optional<int> read_number(int fd, std::string_view key) {
  std::optional<int> number;
  bool is_wanted = false;
  read_fields(fd, [&](bool is_key, off_t offset, std::uint32_t length) {
    if (is_key) {
      is_wanted = is_at(fd, offset, length, key);
    } else if (is_wanted) {
      std::array<char, 16> digits{};
      const bool fits =
          length <= digits.size() && ::pread(fd, digits.data(), length, offset) == length;
      number = base::parse_number({digits.data(), fits ? length : 0}, 0,
                                  std::numeric_limits<int>::max());
    }
    return true;
  });
  return number;
}

// FileStore removes its file if its own two counts say that no store of the world is left. It
// changes one after the other, so that the file stays if two stores end at once. This counts again
// once FileStore has ended.
class FileRemoval {
 protected:
  FileRemoval(std::string path, int size) : path_(std::move(path)), size_(size) {}
  FileRemoval(const FileRemoval&) = delete;
  FileRemoval& operator=(const FileRemoval&) = delete;
  ~FileRemoval() {
    const base::UniqueFd file(::open(path_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
    if (!file || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;  // another store uses it
    if (read_number(file.get(), kStores) == 0 &&
        read_number(file.get(), kStoresThatEnded).value_or(0) >= size_) {
      ::unlink(path_.c_str());
    }
  }

 private:
  std::string path_;
  int size_;
};

// FileRemoval is the first base, so that it is destroyed last.
class RemovedFileStore final : private FileRemoval, public c10d::FileStore {
 public:
  RemovedFileStore(const std::string& path, int size)
      : FileRemoval(path, size), c10d::FileStore(path, size) {}
};

// FileStore itself would retry failed calls, and wait for locks.
void check_file(const Plan& plan, const std::string& what, const base::Deadline& deadline) {
  const base::UniqueFd file(
      ::open(plan.path.c_str(), O_RDWR | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0644));
  if (!file) throw base::errno_error("cannot use " + what + " for the rendezvous");
  while (::flock(file.get(), LOCK_SH | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) throw base::errno_error("cannot lock " + what);
    if (deadline.expired()) {
      throw Timeout(fmt::format("{} stayed locked for the timeout of {} s by another process, "
                                "which may be stopped; this is rank {} of {}",
                                what, deadline.budget().count() / 1000.0, plan.rank, plan.size),
                    {}, "connect", 0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!holds_store(file.get())) {
    throw UsageError(what +
                     " is not a c10d::FileStore: give a path that does not exist yet, or remove "
                     "the file if a killed job left it");
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_file_store(const Plan& plan, const std::string& what,
                                                const base::Deadline& deadline) {
  check_file(plan, what, deadline);
  return c10::make_intrusive<RemovedFileStore>(plan.path, plan.size);
}

void claim_rank(c10d::Store& store, const Plan& plan) {
  if (store.add(fmt::format("claimed/{}", plan.rank), 1) == 1) return;
  throw UsageError(
      fmt::format("file://{} has been joined by a rank {} before: an earlier job that was killed "
                  "left the file, or two processes have the same rank. Remove the file before a "
                  "job starts (rm {})",
                  plan.path, plan.rank, plan.path));
}

}  // namespace paceline::distributed
