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
#include <string_view>
#include <thread>

#include "base/errno_error.h"
#include "base/unique_fd.h"

namespace paceline::distributed {
namespace {

// Whether the file has the format of c10d::FileStore: alternating keys and values, each after its
// length; the first value is a count. FileStore would read other files for ever, or until memory
// runs out.
bool holds_store(int fd) {
  constexpr std::string_view kFirstKey = "refcount/";
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return false;
  std::array<char, kFirstKey.size()> first{};
  off_t at = 0;
  bool is_key = true;
  for (std::uint32_t length = 0; at < status.st_size; is_key = !is_key) {
    if (::pread(fd, &length, sizeof(length), at) != sizeof(length)) return false;
    at += static_cast<off_t>(sizeof(length));
    if (at == sizeof(length) &&
        (length != first.size() || ::pread(fd, first.data(), first.size(), at) != first.size() ||
         std::string_view(first.data(), first.size()) != kFirstKey)) {
      return false;
    }
    at += static_cast<off_t>(length);
  }
  return at == status.st_size && is_key;
}

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
  return c10::make_intrusive<c10d::FileStore>(plan.path, plan.size);
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
