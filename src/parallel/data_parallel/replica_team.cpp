#include "parallel/data_parallel/replica_team.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <paceline/error.h>

#include "distributed/devices/streams.h"
#include "distributed/intraop_threads.h"
#include "distributed/translate.h"

namespace paceline::data_parallel {
namespace {

// Keeps autocast scopes within a replica from clearing the cache of converted parameters, which all
// threads of the process share: a replica that then converts a parameter again rounds its gradient
// differently.
class AutocastCacheKept {
 public:
  // `clears`: whether this is the last one of the replicas to end.
  explicit AutocastCacheKept(bool clears) : clears_(clears) { at::autocast::increment_nesting(); }
  AutocastCacheKept(const AutocastCacheKept&) = delete;
  AutocastCacheKept& operator=(const AutocastCacheKept&) = delete;
  ~AutocastCacheKept() {
    if (at::autocast::decrement_nesting() == 0 && clears_) at::autocast::clear_cache();
  }

 private:
  bool clears_;
};

// What a replica's thread takes over from the calling one.
class CallerState {
 public:
  explicit CallerState(const std::vector<at::Device>& devices) {
    for (const at::Device& device : devices) {
      streams_.push_back(device.is_cpu() ? std::nullopt
                                         : std::optional(distributed::current_stream(device)));
    }
  }

  template <typename Body>
  void within(std::size_t replica, Body&& body) const {
    const c10::OptionalStreamGuard stream(streams_[replica]);
    if (replica == 0) return body();
    const at::ThreadLocalStateGuard guard(state_);
    at::autocast::set_autocast_cache_enabled(caches_);  // not a part of the state above
    const AutocastCacheKept kept(false);
    body();
  }

 private:
  at::ThreadLocalState state_;
  bool caches_ = at::autocast::is_autocast_cache_enabled();
  std::vector<std::optional<c10::Stream>> streams_;
};

}  // namespace

ReplicaTeam::ReplicaTeam(std::vector<at::Device> devices)
    : devices_(std::move(devices)), threads_(devices_.size()) {
  stats_.replicas.resize(devices_.size());
}

void ReplicaTeam::run(std::size_t count, Duration DataParallelStats::Replica::*time,
                      const Task& task) {
  const CallerState caller(devices_);
  const int share = std::max(1, at::get_num_threads() / static_cast<int>(count));
  std::vector<std::exception_ptr> errors(count);
  const AutocastCacheKept kept(true);
  threads_.run(count, [&](std::size_t replica) {
    try {
      const distributed::IntraopThreads threads(share);
      caller.within(replica, [&] {
        const Stopwatch watch(stats_.replicas[replica].*time);
        task(replica);
      });
    } catch (...) {
      errors[replica] = std::current_exception();
    }
  });
  for (std::size_t i = 0; i < count; ++i) {
    if (errors[i]) rethrow(errors[i], i);
  }
}

void ReplicaTeam::rethrow(const std::exception_ptr& error, std::size_t replica) const {
  const auto text = [&] {
    return fmt::format("replica {} of {} on {}: {}", replica, devices_.size(),
                       devices_[replica].str(), distributed::current_exception_text());
  };
  try {
    std::rethrow_exception(error);
  } catch (const UsageError&) {
    std::throw_with_nested(UsageError(text()));
  } catch (...) {
    std::throw_with_nested(Error(text()));
  }
}

ReplicaTeam::Use::Use(ReplicaTeam& team) : team_(team) {
  if (!team.in_use_.exchange(true)) return;
  throw UsageError(
      "DataParallel: a forward or backward of it was running already: do not call it within its "
      "own replicas, and use it on one thread at a time");
}

}  // namespace paceline::data_parallel
