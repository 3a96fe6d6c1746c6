#include "distributed/handle_exchange.h"

#include <fmt/format.h>

#include <atomic>
#include <optional>
#include <utility>

#include <paceline/error.h>

#include "base/wait_report.h"
#include "distributed/store_calls.h"
#include "distributed/topology.h"
#include "shm/membership/failure.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {
namespace {

// How a round ends. The first rank that writes this in the store decides for all. If it is
// complete, every rank that is alive calls reconfigure.
constexpr const char* kRoundComplete = "complete";
constexpr const char* kRoundAborted = "aborted";

// Among the keys of all rounds: set once a rank has finished, and by this rank.
constexpr const char* kAnyFinished = "finished";
std::string finished_key(int rank) {
  return fmt::format("finished {}", rank);
}

// This rank's part. It runs on a thread of its own, so it owns all it needs.
class Rounds {
 public:
  Rounds(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string handle,
         std::int64_t first, const base::Deadline& deadline, std::function<void()> when_late)
      : store_(std::move(store)),
        rank_(rank),
        size_(size),
        handle_(std::move(handle)),
        number_(first),
        deadline_(deadline),
        when_late_(std::move(when_late)) {}

  struct Answer {
    std::optional<HandleRound> round;
    shm::RankSet finished{};  // so that no round can be complete
    shm::RankSet missing{};   // when the time was over
  };

  Answer operator()(const std::atomic<bool>& cancelled) {
    base::WaitReport report;
    for (;; ++number_) {
      if (store_->compareSet(key_of(rank_), "", handle_) != handle_) {
        end(kRoundAborted);
        continue;
      }
      await(report, cancelled);
      const shm::RankSet missing = find_missing();
      if (end(missing.empty() ? kRoundComplete : kRoundAborted) == kRoundComplete)
        return {.round = collect()};
      const shm::RankSet finished = find_finished();
      if (finished.empty() && !is_over(cancelled)) continue;
      report.abandon();
      return {.round = std::nullopt, .finished = finished, .missing = missing};
    }
  }

 private:
  std::string key(const std::string& what) const { return fmt::format("{} {}", number_, what); }
  std::string key_of(int rank) const { return key(std::to_string(rank)); }
  std::string end(const char* how) const { return store_->compareSet(key("end"), "", how); }
  bool is_over(const std::atomic<bool>& cancelled) const {
    return cancelled || deadline_.expired();
  }

  // For the handles of all ranks, or the end of the round.
  void await(base::WaitReport& report, const std::atomic<bool>& cancelled) {
    std::vector<std::string> keys;
    for (const int rank : every_rank(size_)) keys.push_back(key_of(rank));
    await_keys(*store_, keys, [&] {
      if (is_over(cancelled) || store_->check({key("end")})) return true;
      if (!find_finished().empty()) return true;
      if (when_late_ && late_.expired()) std::exchange(when_late_, nullptr)();
      report.check([&](const std::string& waited, auto) { return describe_wait(waited); });
      return false;
    });
  }

  shm::RankSet find_missing() const {
    shm::RankSet missing;
    for (const int rank : every_rank(size_)) {
      if (!store_->check({key_of(rank)})) missing.insert(rank);
    }
    return missing;
  }

  // Ranks ask often, and there may be many.
  shm::RankSet find_finished() const {
    shm::RankSet finished;
    if (!store_->check({kAnyFinished})) return finished;
    for (const int rank : every_rank(size_)) {
      if (store_->check({finished_key(rank)})) finished.insert(rank);
    }
    return finished;
  }

  // The lowest rank that has come reports.
  std::optional<base::WaitReport::Text> describe_wait(const std::string& waited) const {
    const shm::RankSet missing = find_missing();
    const shm::RankSet here = shm::RankSet::all(size_) - missing;
    if (missing.empty() || *here.begin() != rank_) return std::nullopt;
    const shm::GlobalRanks ranks;
    return base::WaitReport::Text{
        fmt::format("{} {} waited {} for {}, which {} not come to reconfigure",
                    ranks.describe(here), shm::has_or_have(here), waited, ranks.describe(missing),
                    shm::has_or_have(missing)),
        "reconfigure"};
  }

  HandleRound collect() const {
    HandleRound round{number_, {}};
    for (const int rank : every_rank(size_)) {
      round.handles.push_back(store_->get_to_str(key_of(rank)));
    }
    return round;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::string handle_;
  std::int64_t number_;
  base::Deadline deadline_;
  base::Deadline late_ = base::Deadline::after(std::chrono::seconds(1));
  std::function<void()> when_late_;
};

}  // namespace

HandleRound exchange_handles(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             const std::string& handle, std::int64_t first,
                             const base::Deadline& deadline, std::function<void()> when_late) {
  auto answer = call_store(
      deadline, Rounds(store, rank, size, handle, first, deadline, std::move(when_late)));
  if (answer && answer->round) return std::move(*answer->round);
  if (answer && !answer->finished.empty()) {
    throw Mismatch(
        fmt::format(
            "{} {} finished (record returned without an error), and will not come to "
            "reconfigure; this is rank {} of {}. Call barrier() before the end, so that the "
            "ranks end together",
            shm::GlobalRanks().describe(answer->finished), shm::has_or_have(answer->finished), rank,
            size),
        answer->finished.list(), "reconfigure", 0);
  }
  const shm::RankSet missing = answer ? answer->missing : shm::RankSet();
  throw Timeout(fmt::format("{} within the timeout of {} s; this is rank {} of {}",
                            missing.empty() ? describe_store(*store) + " did not answer"
                                            : shm::GlobalRanks().describe(missing) +
                                                  " did not come to reconfigure",
                            deadline.budget().count() / 1000.0, rank, size),
                missing.list(), "reconfigure", 0);
}

void finish_handle_exchange(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  call_store(base::Deadline::after(std::chrono::seconds(1)),
             [store, key = finished_key(rank)](const std::atomic<bool>& /*cancelled*/) {
               store->set(key, "1");
               store->set(kAnyFinished, "1");
               return true;
             });
}

}  // namespace paceline::distributed
