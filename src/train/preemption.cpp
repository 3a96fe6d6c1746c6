#include <paceline/preemption.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/environment.h"
#include "launch/job_result.h"
#include "launch/signal_names.h"
#include "parallel/with_error_context.h"

namespace paceline {
namespace {

static_assert(Preemption::exit_code == launch::kPreemptedCode);
static_assert(std::atomic<bool>::is_always_lock_free);

std::atomic<bool> handled;   // there is a Preemption
std::atomic<bool> received;  // one of its signals

void note_signal(int /*signal*/) {
  received = true;
}

std::vector<int> default_signals() {
  std::vector<int> signals{SIGTERM, SIGUSR1};
  if (const auto& list = base::environment().signals_to_handle) {
    for (const int signal : launch::parse_signals(*list, "TORCHELASTIC_SIGNALS_TO_HANDLE")) {
      signals.push_back(signal);
    }
  }
  std::ranges::sort(signals);
  signals.erase(std::unique(signals.begin(), signals.end()), signals.end());
  return signals;
}

}  // namespace

// Restores in its destructor what it has replaced.
class Preemption::Handlers {
 public:
  Handlers() {
    if (handled.exchange(true))
      throw UsageError("Preemption: there is one in this process already");
    received = false;
  }
  Handlers(const Handlers&) = delete;
  Handlers& operator=(const Handlers&) = delete;
  ~Handlers() {
    while (!before_.empty()) {
      ::sigaction(before_.back().first, &before_.back().second, nullptr);
      before_.pop_back();
    }
    handled = false;
  }

  void add(int signal) {
    struct sigaction before {};
    struct sigaction action {};
    action.sa_handler = note_signal;
    action.sa_flags = SA_RESTART;
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) return;
    if (::sigaction(signal, &action, nullptr) != 0) {
      throw UsageError(fmt::format("Preemption: {} cannot be handled: {}",
                                   launch::signal_name(signal), std::strerror(errno)));
    }
    before_.emplace_back(signal, before);
  }

  void keep() { before_.clear(); }

 private:
  std::vector<std::pair<int, struct sigaction>> before_;
};

Preemption::Preemption(PreemptionOptions options)
    : handlers_(std::make_unique<Handlers>()), group_(std::move(options.group)) {
  for (const int signal : options.signals ? *options.signals : default_signals()) {
    handlers_->add(signal);
  }
}

// The job ends now, and a launcher may pass on another signal, or the same one to this rank later.
Preemption::~Preemption() {
  if (requested_) handlers_->keep();
}

bool Preemption::requested() {
  if (requested_) return true;
  const at::Tensor any = at::full({1}, received ? 1 : 0, at::kInt);
  parallel::with_error_context(
      "asking all ranks; call requested() on all of them, equally often",
      [&] { all_reduce(any, {.op = ReduceOp::MAX, .group = group_}); }, "Preemption");
  requested_ = any.item<int>() != 0;
  return requested_;
}

}  // namespace paceline
