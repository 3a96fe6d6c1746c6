#include "distributed/store_exchange.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <iterator>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include "base/log.h"
#include "distributed/store_calls.h"
#include "distributed/topology.h"
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

// How long rank 0 stays, at most, for the others to hear a verdict: they may have yet to connect to
// the store, which tries again after a second or so.
constexpr std::chrono::seconds kFarewell{5};

// Why ranks do not meet, by group rank. At most one of the lists has elements.
struct Verdict {
  std::vector<int> lost{};     // their processes ended before they came
  std::vector<int> missing{};  // at the deadline
  std::vector<int> sizes{};    // that the ranks were given, if they differ: two of them

  bool empty() const { return lost.empty() && missing.empty() && sizes.empty(); }
  std::string encode() const {
    if (!lost.empty()) return fmt::format("lost {}", fmt::join(lost, " "));
    if (!missing.empty()) return fmt::format("missing {}", fmt::join(missing, " "));
    return fmt::format("sizes {}", fmt::join(sizes, " "));
  }
  static Verdict decode(const std::string& text) {
    Verdict verdict;
    std::istringstream stream(text);
    std::string kind;
    stream >> kind;
    auto& numbers = kind == "lost"      ? verdict.lost
                    : kind == "missing" ? verdict.missing
                                        : verdict.sizes;
    for (int number = 0; stream >> number;) numbers.push_back(number);
    return verdict;
  }
};

// This rank's part in an exchange. It runs on a thread of its own, so it owns all it needs.
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
    Verdict verdict;
  };

  // Rank 0 may serve the store, so it stays until all ranks have read their results, except ranks
  // that are missing or have ended.
  void part(const std::vector<int>& missing) const {
    store_->set(key("heard", rank_), "");
    if (rank_ != 0) return;
    std::vector<int> waiting;
    std::ranges::set_difference(every_rank(size_), missing, std::back_inserter(waiting));
    const auto soon = base::Deadline::after(
        std::min<std::chrono::milliseconds>(kFarewell, deadline_.remaining() + shm::kVerdict));
    for (const int rank : waiting) {
      static_cast<void>(
          wait_for({key("heard", rank)}, [&] { return has_ended(rank) || soon.expired(); }));
    }
  }

  Answer operator()(const std::atomic<bool>& cancelled) const {
    try {
      return gather(cancelled);
    } catch (const std::exception&) {
      // The store may have ended with the rank that serves it.
      auto lost = await_ended();
      if (lost.empty()) throw;
      return {{}, {.lost = std::move(lost)}};
    }
  }

 private:
  // Set once a rank has stopped waiting for the others.
  static constexpr const char* kVerdictKey = "verdict";
  static std::string key(const char* what, int rank) { return fmt::format("{}{}", what, rank); }
  static std::vector<std::string> keys_of(const char* what, const std::vector<int>& ranks) {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(key(what, rank));
    return keys;
  }

  // The blob of a rank that has come, whose record is its size, a space and the blob. `sizes`
  // becomes its size and this rank's, if they differ.
  std::string read(int rank, std::vector<int>& sizes) const {
    const std::string text = store_->get_to_str(key("rank", rank));
    const std::size_t space = std::min(text.find(' '), text.size());
    int size = size_;
    std::from_chars(text.data(), text.data() + space, size);
    if (size != size_) sizes = {std::min(size, size_), std::max(size, size_)};
    return text.substr(std::min(space + 1, text.size()));
  }

  Answer gather(const std::atomic<bool>& cancelled) const {
    const auto keys = keys_of("rank", every_rank(size_));
    translate("announcing this rank in the store",
              [&] { store_->set(key("rank", rank_), fmt::format("{} {}", size_, blob_)); });
    Answer answer;
    Verdict& verdict = answer.verdict;
    const bool all_came = translate("waiting for the other ranks", [&] {
      bool met_rank_0 = false;
      const bool all_announced = wait_for(keys, [&] {
        if (cancelled || deadline_.expired() || store_->check({kVerdictKey})) return true;
        verdict.lost = find_lost();
        if (!met_rank_0 && has_come(0)) {
          met_rank_0 = true;
          read(0, verdict.sizes);
        }
        return !verdict.empty();
      });
      // The last rank may come after the others have timed out.
      return all_announced && !store_->check({kVerdictKey});
    });
    // check_peers knows more, and has thrown.
    if (!all_came && cancelled && !deadline_.expired()) return {};
    const auto settle_all = [&] {
      verdict =
          translate("asking the store who has come", [&] { return settle(std::move(verdict)); });
    };
    if (!all_came) settle_all();
    if (!verdict.empty()) return answer;
    translate("reading the other ranks' addresses from the store", [&] {
      for (const int rank : every_rank(size_)) answer.blobs.push_back(read(rank, verdict.sizes));
    });
    if (!verdict.empty()) settle_all();
    return answer;
  }

  // Returns false if keys are still missing when `should_stop` returns true.
  template <typename Stop>
  bool wait_for(const std::vector<std::string>& keys, Stop should_stop) const {
    for (auto pause = kFirstPause; !store_->check(keys);
         pause = std::min(2 * pause, kLongestPause)) {
      if (should_stop()) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  bool has_come(int rank) const { return store_->check({key("rank", rank)}); }
  bool has_ended(int rank) const {
    return processes_ && processes_->peers[static_cast<std::size_t>(rank)].ended();
  }
  std::vector<int> find_lost() const {
    std::vector<int> lost;
    for (const int rank : every_rank(size_)) {
      if (has_ended(rank) && !has_come(rank)) lost.push_back(rank);
    }
    return lost;
  }
  // The ranks that have ended; a process closes its files before it counts as that.
  std::vector<int> await_ended() const {
    std::vector<int> ended;
    const auto soon = base::Deadline::after(shm::kVerdict);
    while (processes_ && ended.empty() && !soon.expired()) {
      for (const int rank : every_rank(size_)) {
        if (has_ended(rank)) ended.push_back(rank);
      }
      if (ended.empty()) std::this_thread::sleep_for(kFirstPause);
    }
    return ended;
  }

  // The first rank that stops waiting decides for all, since others may have started to wait later.
  // Empty if all came at the last moment.
  Verdict settle(Verdict own) const {
    if (store_->check({kVerdictKey})) {
      own = Verdict::decode(store_->get_to_str(kVerdictKey));
    } else {
      if (own.empty()) {
        std::ranges::copy_if(every_rank(size_), std::back_inserter(own.missing),
                             [&](int rank) { return !has_come(rank); });
      }
      if (own.empty()) return own;
      store_->set(kVerdictKey, own.encode());
    }
    part(own.missing);
    return own;
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
  if (!answer) {
    throw Timeout(fmt::format("{} did not answer within the timeout of {} s; this is rank {} of {}",
                              describe_store(*request_.store), deadline.budget().count() / 1000.0,
                              request_.global_ranks().of(rank()), size()),
                  {}, "connect", 0);
  }
  const Verdict& verdict = answer->verdict;
  if (verdict.empty()) return std::move(answer->blobs);
  const shm::GlobalRanks global_ranks = request_.global_ranks();
  if (!verdict.lost.empty()) throw_lost(global_ranks, shm::RankSet(verdict.lost));
  const bool world = request_.group_name == "world";
  if (!verdict.sizes.empty()) {
    throw UsageError(fmt::format(
        "the ranks disagree on the size of {}: some were given {} ranks, others {}. Give all ranks "
        "the same {}",
        world ? "the world" : "group " + request_.group_name, verdict.sizes.front(),
        verdict.sizes.back(), world ? "world size (WORLD_SIZE, or .world_size)" : "list of ranks"));
  }
  const shm::RankSet missing(verdict.missing);
  throw Timeout(
      fmt::format("{} did not come to the rendezvous{} within the timeout of {} s; this is "
                  "rank {} of {}",
                  global_ranks.describe(missing), world ? "" : " of group " + request_.group_name,
                  deadline.budget().count() / 1000.0, global_ranks.of(rank()), size()),
      global_ranks.of(missing).list(), "connect", 0);
}

void StoreExchange::let_others_read() noexcept {
  try {
    const auto deadline = base::Deadline::after(kFarewell);
    call_store(deadline, [gathering = Gathering(request_, "", deadline)](const auto&) {
      gathering.part({});
      return true;
    });
  } catch (const std::exception& error) {
    base::log(LogLevel::debug, "leaving the rendezvous: {}", error.what());
  }
}

void throw_lost(const shm::GlobalRanks& global_ranks, const shm::RankSet& ranks) {
  const bool one = ranks.count() == 1;
  throw PeerLost(fmt::format("{} {} lost ({} ended) and did not come to the rendezvous again",
                             global_ranks.describe(ranks), one ? "was" : "were",
                             one ? "its process" : "their processes"),
                 global_ranks.of(ranks).list(), "connect", 0);
}

}  // namespace paceline::distributed
