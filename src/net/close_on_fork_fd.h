#pragma once

#include <memory>

#include "base/unique_fd.h"

namespace paceline::net {

// A descriptor that forked children close at once, as with FD_CLOFORK, which Linux lacks: in a
// child it is none. Otherwise the peer of a socket would not see that its process has ended while a
// child lives.
class CloseOnForkFd {
 public:
  CloseOnForkFd() = default;
  explicit CloseOnForkFd(base::UniqueFd fd);

  int get() const { return fd_ ? fd_->get() : -1; }
  void reset() { fd_.reset(); }

 private:
  struct Close {
    void operator()(base::UniqueFd* fd) const;
  };
  std::unique_ptr<base::UniqueFd, Close> fd_;
};

}  // namespace paceline::net
