#include "shm/collectives/monitored_barrier.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <string>
#include <vector>

#include "shm/collectives/cross_wait.h"
#include "shm/late_ranks.h"

namespace paceline::shm {
namespace {

constexpr const char* kName = "monitored_barrier";

}  // namespace

void throw_not_arrived(int host, const RankSet& missing, std::chrono::milliseconds timeout,
                       bool wait_all_ranks, std::uint32_t round) {
  const std::string text =
      timeout.count() <= 0
          ? fmt::format("Rank {} timed out in monitoredBarrier after {} ms", host, timeout.count())
          : fmt::format("Rank{} {} failed to pass monitoredBarrier in {} ms",
                        wait_all_ranks ? "s" : "", fmt::join(missing.list(), ", "),
                        timeout.count());
  throw Timeout(text, missing.list(), kName, round);
}

void throw_not_passed(int rank, int host, const RankSet& missing, std::uint32_t round) {
  throw Timeout(fmt::format("Rank {} successfully reached monitoredBarrier, but received errors "
                            "while waiting for send/recv from rank {}: {} did not pass it",
                            rank, host, describe_ranks(missing)),
                missing.list(), kName, round);
}

// For the log: the errors have PyTorch's words.
class MonitoredBarrier::ArrivalWait : public WaitContext {
 public:
  ArrivalWait(const MonitoredBarrier& barrier, CallDeadline& call_deadline)
      : WaitContext({kName, barrier.round_}, call_deadline), barrier_(barrier) {}

  RankSet missing() const override {
    RankSet ranks;
    for (int rank = 0; rank < barrier_.region_->size(); ++rank) {
      if (!barrier_.has_arrived(rank)) ranks.insert(rank);
    }
    return ranks;
  }
  std::string describe() const override {
    return fmt::format("{} {} of group {}", kName, barrier_.round_,
                       barrier_.region_->options().name);
  }

 private:
  const MonitoredBarrier& barrier_;
};

bool MonitoredBarrier::has_arrived(int rank) const {
  return Region::reached(region_->memory().collectives(rank).barrier.arrived, round_);
}

void MonitoredBarrier::pass(std::chrono::milliseconds timeout, bool wait_all_ranks) {
  region_->check_usable({kName, round_});
  ++round_;
  settling_.reset();
  stops_ = StopDetector();
  const int me = region_->rank();
  region_->publish(region_->memory().collectives(me).barrier.arrived, round_);
  CallDeadline call_deadline{timeout};
  ArrivalWait context(*this, call_deadline);
  if (me == 0) return collect(timeout, wait_all_ranks, context);
  region_->ring(0);
  const BarrierArrival& host = region_->memory().collectives(0).barrier;
  // Rank 0 waits for its own timeout, which begins when it arrives.
  const auto until_verdict = base::Deadline::after(timeout).remaining() + kVerdict;
  auto arrival = base::Deadline::after(timeout);
  bool told = wait_for(host.arrived, 0, arrival, timeout, context);
  if (told) {
    auto verdict = base::Deadline::after(until_verdict);
    told = wait_for(host.over, 0, verdict, until_verdict, context);
  }
  if (told && Region::reached(host.complete, round_)) return;
  const GlobalRanks& ranks = region_->global_ranks();
  const RankSet missing =
      told ? RankSet(RankSet::Words{host.missing.load(std::memory_order_relaxed)}) : RankSet{0};
  throw_not_passed(ranks.of(me), ranks.of(0), ranks.of(missing), round_);
}

void MonitoredBarrier::collect(std::chrono::milliseconds timeout, bool wait_all_ranks,
                               ArrivalWait& context) {
  auto deadline = base::Deadline::after(timeout);
  LocalRankMask bits = 0;
  for (int peer = 1; peer < region_->size(); ++peer) {
    const Word& arrived = region_->memory().collectives(peer).barrier.arrived;
    if (wait_for(arrived, peer, deadline, timeout, context)) continue;
    bits |= local_rank_bit(peer);
    if (!wait_all_ranks) break;
  }
  BarrierArrival& own = region_->memory().collectives(0).barrier;
  if (bits == 0) {
    own.complete.store(round_, std::memory_order_relaxed);
  } else {
    own.missing.store(bits, std::memory_order_relaxed);
  }
  region_->publish(own.over, round_);
  for (int peer = 1; peer < region_->size(); ++peer) region_->ring(peer);
  if (bits == 0) return;
  const GlobalRanks& ranks = region_->global_ranks();
  throw_not_arrived(ranks.of(0), ranks.of(RankSet(RankSet::Words{bits})), timeout, wait_all_ranks,
                    round_);
}

// False if the deadline came first. `timeout`: the deadline's; it moves by the time for which this
// process was stopped.
bool MonitoredBarrier::wait_for(const Word& word, int peer, base::Deadline& deadline,
                                std::chrono::milliseconds timeout, ArrivalWait& context) {
  while (true) {
    const std::uint32_t heard = region_->rings();
    if (Region::reached(word, round_)) return true;
    if (const auto stopped = stops_.look(); stopped.count() > 0) {
      StopDetector::postpone(deadline, stopped, timeout);
      settling_.reset();
    }
    region_->check_usable({kName, round_});
    if (!region_->peers().is_here(peer) && !Region::reached(word, round_)) {
      region_->fail_lost(peer, kName, {kName, round_});
    }
    const bool late = deadline.expired();
    check_calls(late);
    if (late) return false;
    const RankSet missing = context.missing();  // rank 0 waits for these too
    report_late_ranks(*region_, missing.empty() ? peer : *missing.begin(), context);
    region_->listen(heard);
  }
}

// A rank that waits for this one in a call of the group and has not arrived here never will: each
// waits for the other. A rank that has arrived may have timed out and moved on. The verdict waits a
// moment for ranks in neither state, so that it finds the majority.
void MonitoredBarrier::check_calls(bool late) {
  std::vector<std::string> made;
  RankSet unknown;
  std::optional<CollectiveFingerprint> other;
  for (int rank = 0; rank < region_->size(); ++rank) {
    const auto call = call_without_this_rank(*region_, rank);
    if (has_arrived(rank)) {
      made.emplace_back(kName);
    } else if (call) {
      other = call;
      made.push_back(describe(*call, region_->global_ranks()));
    } else {
      unknown.insert(rank);
      made.emplace_back("nothing yet");
    }
  }
  if (!other) return;
  if (!settling_) settling_ = base::Deadline::after(kVerdict);
  if (!unknown.empty() && !late && !settling_->expired()) return;
  const auto found = explain_disagreement(made, region_->global_ranks());
  region_->fail({FailureKind::mismatch, region_->global_ranks().of(found.ranks - unknown),
                 fmt::format("{}; call {} of group {}", found.text, other->sequence,
                             region_->options().name)},
                {kName, round_});
}

}  // namespace paceline::shm
