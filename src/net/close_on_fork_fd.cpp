#include "net/close_on_fork_fd.h"

#include <pthread.h>

#include <mutex>
#include <set>
#include <utility>

namespace paceline::net {
namespace {

struct OpenFds {
  std::mutex mutex;
  std::set<base::UniqueFd*> fds;
};

// Never destroyed: a process may fork while it ends. Its children find no set that is half changed.
OpenFds& open_fds() {
  static OpenFds& open = *new OpenFds;
  static const int registered =
      ::pthread_atfork([] { open.mutex.lock(); }, [] { open.mutex.unlock(); },
                       [] {
                         for (base::UniqueFd* const fd : open.fds) fd->reset();
                         open.mutex.unlock();
                       });
  static_cast<void>(registered);
  return open;
}

}  // namespace

CloseOnForkFd::CloseOnForkFd(base::UniqueFd fd) {
  OpenFds& open = open_fds();
  const std::lock_guard lock(open.mutex);
  auto owned = std::make_unique<base::UniqueFd>(std::move(fd));
  open.fds.insert(owned.get());
  fd_.reset(owned.release());
}

void CloseOnForkFd::Close::operator()(base::UniqueFd* fd) const {
  OpenFds& open = open_fds();
  const std::lock_guard lock(open.mutex);
  open.fds.erase(fd);
  delete fd;
}

}  // namespace paceline::net
