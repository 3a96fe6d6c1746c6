#include "distributed/store_barrier.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/deadline.h"
#include "distributed/store_calls.h"
#include "distributed/translate.h"
#include "shm/collectives/monitored_barrier.h"

namespace paceline::distributed {
namespace {

constexpr const char* kVerdictKey = "verdict";

// One rank's part in a barrier. It runs on a thread of its own, so it owns all it needs.
//
// The keys of a rank have the number of its last barrier. The verdict has the number of rank 0's,
// that of the last one that all ranks passed, and the group ranks that are missing.
struct StoreBarrierRound {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  std::uint64_t number;
  std::uint64_t passed;  // the last one before it that all ranks passed; on rank 0
  std::chrono::milliseconds arrival_timeout;  // for the ranks that this one waits for
  std::chrono::milliseconds verdict_timeout;  // from the arrival of rank 0
  bool wait_all_ranks;
  // Whether this rank knows the verdict.
  std::shared_ptr<std::atomic<bool>> decided = std::make_shared<std::atomic<bool>>(false);

  // The group ranks that are missing. Unspecified once `cancelled`.
  std::vector<int> operator()(const std::atomic<bool>& cancelled) const {
    return (rank == 0 ? collect(cancelled) : arrive(cancelled)).list();
  }

 private:
  static std::string arrival(int rank) { return fmt::format("arrived {}", rank); }
  static std::string departure(int rank) { return fmt::format("heard {}", rank); }

  // The numbers at a key; none if it is not there.
  std::vector<std::uint64_t> read(const std::string& key) const {
    if (!store->check({key})) return {};
    std::istringstream text(store->get_to_str(key));
    return {std::istream_iterator<std::uint64_t>(text), {}};
  }
  bool has_reached(const std::string& key) const {
    const auto numbers = read(key);
    return !numbers.empty() && numbers.front() >= number;
  }
  void reach(const std::string& key) const { store->set(key, std::to_string(number)); }
  bool await(const std::string& key, const base::Deadline& deadline,
             const std::atomic<bool>& cancelled) const {
    return poll_until([&] { return has_reached(key); },
                      [&] { return cancelled || deadline.expired(); });
  }

  shm::RankSet collect(const std::atomic<bool>& cancelled) const {
    const auto deadline = base::Deadline::after(arrival_timeout);
    reach(arrival(0));
    shm::RankSet missing;
    for (int peer = 1; peer < size && (missing.empty() || wait_all_ranks); ++peer) {
      if (!await(arrival(peer), deadline, cancelled)) missing.insert(peer);
    }
    if (!missing.empty() && cancelled) return missing;
    store->set(kVerdictKey, fmt::format("{} {} {}", number, missing.empty() ? number : passed,
                                        fmt::join(missing.list(), " ")));
    *decided = true;
    const auto soon = base::Deadline::after(kFarewell);
    for (int peer = 1; peer < size; ++peer) {
      if (missing.contains(peer) || !has_reached(arrival(peer))) continue;
      poll_until([&] { return has_reached(departure(peer)); }, [&] { return soon.expired(); });
    }
    return missing;
  }

  shm::RankSet arrive(const std::atomic<bool>& cancelled) const {
    reach(arrival(rank));
    const bool heard = await(arrival(0), base::Deadline::after(arrival_timeout), cancelled) &&
                       await(kVerdictKey, base::Deadline::after(verdict_timeout), cancelled);
    const auto verdict = heard ? read(kVerdictKey) : std::vector<std::uint64_t>();
    *decided = heard;
    if (heard || !cancelled) reach(departure(rank));
    if (!heard) return {0};
    shm::RankSet missing;
    if (verdict.size() < 2 || verdict[1] >= number) return missing;
    for (std::size_t at = 2; at < verdict.size(); ++at) {
      missing.insert(static_cast<int>(verdict[at]));
    }
    return missing;
  }
};

// What the round has found already, if it has a verdict.
std::optional<std::vector<int>> look_again(StoreBarrierRound round) {
  if (round.rank == 0) return std::nullopt;
  round.arrival_timeout = round.verdict_timeout = std::chrono::milliseconds(0);
  try {
    auto found = call_store(base::Deadline::after(std::chrono::seconds(1)), round);
    return *round.decided ? found : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

StoreBarrier::StoreBarrier(const BackendRequest& request)
    : store_(c10::make_intrusive<c10d::PrefixStore>("monitored_barrier", request.store)),
      store_server_(request.store_server),
      rank_(request.rank),
      size_(request.size),
      ranks_(request.global_ranks()) {}

void StoreBarrier::pass(std::chrono::milliseconds timeout, bool wait_all_ranks,
                        const std::function<void()>& check_peers) {
  const auto limit = base::Deadline::after(timeout).remaining();  // no overflow
  // As in shm::MonitoredBarrier.
  const auto verdict_timeout = rank_ == 0 ? std::chrono::milliseconds(0) : limit + shm::kVerdict;
  const StoreBarrierRound round{store_,  rank_, size_,           ++round_,
                                passed_, limit, verdict_timeout, wait_all_ranks};
  std::optional<std::vector<int>> found;
  try {
    found = call_store(base::Deadline::after(limit + verdict_timeout + kFarewell), round, [&] {
      if (!*round.decided) check_peers();
    });
  } catch (const PeerError&) {
    // A rank that heard the verdict before may have ended with it.
    found = look_again(round);
    if (!found) throw;
  } catch (const c10::DistNetworkError&) {
    explain_lost_store("monitored_barrier: " + current_exception_text(), *store_, store_server_,
                       check_peers, {"monitored_barrier", round_});
  }
  if (!found) {
    throw Timeout(fmt::format("monitored_barrier: {} does not answer", describe_store(*store_)), {},
                  "monitored_barrier", round_);
  }
  const shm::RankSet missing = ranks_.of(shm::RankSet(*found));
  if (missing.empty()) {
    passed_ = round_;
  } else if (rank_ == 0) {
    shm::throw_not_arrived(ranks_.of(0), missing, timeout, wait_all_ranks, round_);
  } else {
    shm::throw_not_passed(ranks_.of(rank_), ranks_.of(0), missing, round_);
  }
}

}  // namespace paceline::distributed
