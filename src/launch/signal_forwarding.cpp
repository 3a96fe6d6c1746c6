#include "launch/signal_forwarding.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/errno_error.h"

namespace paceline::launch {
namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalForwarding::SignalForwarding(std::span<const int> signals) {
  sigset_t set;
  sigemptyset(&set);
  const auto add = [&](int signal) {
    if (!is_ignored(signal)) sigaddset(&set, signal);
  };
  std::ranges::for_each(signals, add);
  add(SIGTSTP);
  fd_ = base::UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw base::errno_error("cannot receive signals");
  ::pthread_sigmask(SIG_BLOCK, &set, &original_mask_);
}

SignalForwarding::~SignalForwarding() {
  // A signal that came after the end of the job must not end the process now.
  while (next() != 0) {
  }
  unblock();
}

void SignalForwarding::unblock() {
  ::pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
}

int SignalForwarding::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return 0;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace paceline::launch
