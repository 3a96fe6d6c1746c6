#include "distributed/store_exchange.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "distributed/store_calls.h"
#include "distributed/translate.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/failure.h"

namespace paceline::distributed {

using namespace std::chrono_literals;

namespace {

// How often to ask the store, at first and after a while. Its own wait() would write a warning to
// the log whenever it is cut short to look after the peers.
constexpr std::chrono::milliseconds kFirstPause{1};
constexpr std::chrono::milliseconds kLongestPause{20};

// One all-gather, for a thread of its own: so it owns what it needs.
class Gathering {
 public:
  Gathering(const BackendRequest& request, std::string blob, const base::Deadline& deadline)
      : store_(request.store),
        rank_(request.rank),
        size_(request.size),
        blob_(std::move(blob)),
        deadline_(deadline),
        processes_(request.processes) {}

  struct Answer {
    std::vector<std::string> blobs;
    std::vector<int> missing;
    std::optional<int> lost;  // a rank whose process ended before it came
  };

  Answer operator()(const std::atomic<bool>& cancelled) const {
    const auto keys = keys_of("rank", every_rank());
    translate("announcing this rank in the store", [&] { store_->set(key("rank", rank_), blob_); });
    Answer answer;
    const bool all_came = translate("waiting for the other ranks", [&] {
      const bool all_announced = wait_for(keys, [&] {
        if (cancelled || deadline_.expired() || store_->check({kMissing})) return true;
        answer.lost = find_lost();
        return answer.lost.has_value();
      });
      // The last to come may come after the others have given up.
      return all_announced && !store_->check({kMissing});
    });
    if (answer.lost) return answer;
    if (!all_came) {
      // check_peers knows more, and has thrown.
      if (cancelled && !deadline_.expired()) return answer;
      answer.missing = translate("asking the store who has come", [&] { return find_missing(); });
    }
    if (!answer.missing.empty()) return answer;
    translate("reading the other ranks' addresses from the store", [&] {
      for (const auto& one : keys) answer.blobs.push_back(store_->get_to_str(one));
    });
    return answer;
  }

 private:
  // Who is missing, once a rank has given up.
  static constexpr const char* kMissing = "missing";
  static std::string key(const char* what, int rank) { return fmt::format("{}{}", what, rank); }
  static std::vector<std::string> keys_of(const char* what, const std::vector<int>& ranks) {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(key(what, rank));
    return keys;
  }
  std::vector<int> every_rank() const {
    std::vector<int> ranks(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  // False if it is time to give up before all keys are there.
  template <typename GiveUp>
  bool wait_for(const std::vector<std::string>& keys, GiveUp give_up) const {
    for (auto pause = kFirstPause; !store_->check(keys);
         pause = std::min(2 * pause, kLongestPause)) {
      if (give_up()) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  std::optional<int> find_lost() const {
    for (int rank = 0; processes_ && rank < size_; ++rank) {
      const auto& process = processes_->peers[static_cast<std::size_t>(rank)];
      if (process.ended() && !store_->check({key("rank", rank)})) return rank;
    }
    return std::nullopt;
  }

  // The first rank that gives up decides for all, which may have begun to wait later.
  std::vector<int> find_missing() const {
    std::vector<int> missing;
    std::vector<int> waiting;
    if (store_->check({kMissing})) {
      std::istringstream ranks(store_->get_to_str(kMissing));
      for (int rank = 0; ranks >> rank;) missing.push_back(rank);
    } else {
      for (const int rank : every_rank()) {
        if (!store_->check({key("rank", rank)})) missing.push_back(rank);
      }
      if (missing.empty()) return {};  // they all came at the last moment
      store_->set(kMissing, fmt::format("{}", fmt::join(missing, " ")));
    }
    store_->set(key("heard", rank_), "");
    // Rank 0 may serve the store, and the others look into it until they have heard.
    if (rank_ == 0) {
      std::ranges::set_difference(every_rank(), missing, std::back_inserter(waiting));
      const auto soon = base::Deadline::after(shm::kVerdict);
      static_cast<void>(wait_for(keys_of("heard", waiting), [&] { return soon.expired(); }));
    }
    return missing;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::string blob_;
  base::Deadline deadline_;
  std::shared_ptr<const shm::Membership> processes_;
};

}  // namespace

std::vector<std::string> StoreExchange::all_gather(const std::string& blob,
                                                   const base::Deadline& deadline) {
  auto answer = call_store(deadline, Gathering(request_, blob, deadline), request_.check_peers);
  if (answer && answer->missing.empty() && !answer->lost) return std::move(answer->blobs);
  const shm::GlobalRanks numbers(request_.world_ranks);
  if (answer && answer->lost) {
    throw PeerLost(fmt::format("rank {} was lost (its process ended) and did not come to the "
                               "rendezvous again",
                               numbers.of(*answer->lost)),
                   {numbers.of(*answer->lost)}, "connect", 0);
  }
  std::vector<int> missing;
  if (answer) {
    for (const int rank : answer->missing) missing.push_back(numbers.of(rank));
  }
  throw Timeout(fmt::format("{} within the timeout of {} s; this is rank {} of {}",
                            answer ? shm::describe_ranks(shm::RankSet(missing)) +
                                         " did not come to the rendezvous"
                                   : describe_store(*request_.store) + " did not answer",
                            deadline.budget().count() / 1000.0, numbers.of(rank()), size()),
                missing, "connect", 0);
}

}  // namespace paceline::distributed
