#include "distributed/store_exchange.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/parse.h"
#include "base/wait_report.h"
#include "distributed/store_calls.h"
#include "distributed/topology.h"
#include "distributed/translate.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/failure.h"

namespace paceline::distributed {

using namespace std::chrono_literals;

namespace {

// How long after the loss of a rank its last blob may come, which says more: an exception that it
// tells the others often ends it.
constexpr auto kLastBlob = 500ms;

// new_group numbers its groups. Others are of a parameter server, or of a split of a group.
bool is_of_new_group(const std::string& name) {
  return base::parse_number<int>(name, 0, std::numeric_limits<int>::max()).has_value();
}

// How a meeting of ranks ends.
struct Verdict {
  enum class Kind { complete, lost, missing, sizes };

  Kind kind;
  // complete: the size. lost: the group ranks whose processes ended before they came. missing:
  // those that had not come at the deadline. sizes: two that ranks were given.
  std::vector<int> numbers;

  std::string encode() const {
    return fmt::format("{} {}", kNames[static_cast<std::size_t>(kind)], fmt::join(numbers, " "));
  }
  static Verdict decode(const std::string& text) {
    std::istringstream stream(text);
    std::string name;
    stream >> name;
    const auto found = std::ranges::find(kNames, name);
    Verdict verdict{static_cast<Kind>(found - std::begin(kNames)), {}};
    for (int number = 0; stream >> number;) verdict.numbers.push_back(number);
    if (found == std::end(kNames) || verdict.numbers.empty()) throw_malformed(text);
    return verdict;
  }
  [[noreturn]] static void throw_malformed(const std::string& text) {
    throw Error(
        fmt::format("the store has \"{:.40}\", which means nothing here: do all ranks run the "
                    "same version of Paceline, and no other program uses the store?",
                    text));
  }

 private:
  static constexpr std::string_view kNames[] = {"complete", "lost", "missing", "sizes"};
};

// The connection to the store is lost.
struct StoreLost : Error {
  using Error::Error;
};

// Like translate, but tells a lost connection from other errors.
template <typename Body>
void ask(const char* operation, Body&& body) {
  translate(operation, [&] {
    try {
      body();
    } catch (const c10::DistNetworkError&) {
      throw StoreLost(fmt::format("{}: {}", operation, current_exception_text()));
    }
  });
}

// This rank's part in an exchange. It runs on a thread of its own, so it owns all it needs.
class Gathering {
 public:
  Gathering(const BackendRequest& request, std::string blob, const base::Deadline& deadline)
      : store_(request.store),
        rank_(request.rank),
        size_(request.size),
        blob_(std::move(blob)),
        deadline_(deadline),
        processes_(request.processes),
        global_ranks_(request.global_ranks()),
        place_(place_of(request)) {}

  // "the rendezvous of group 1".
  static std::string place_of(const BackendRequest& request) {
    const bool world = request.group_name == "world";
    return world ? "the rendezvous" : "the rendezvous of group " + request.group_name;
  }
  using Clock = std::chrono::steady_clock;
  // When the store answered last, while this waits for the other ranks.
  const std::shared_ptr<std::atomic<Clock::time_point>>& answered() const { return answered_; }

  struct Answer {
    std::vector<std::string> blobs;
    Verdict verdict;
  };

  // Rank 0 may serve the store, so it stays until all ranks have read their results, except ranks
  // that are missing or have ended.
  void part(const Verdict& verdict) const {
    store_->set(key("heard", rank_), "");
    if (rank_ != 0) return;
    const bool sizes = verdict.kind == Verdict::Kind::sizes;
    std::vector<int> waiting = every_rank(sizes ? std::ranges::max(verdict.numbers) : size_);
    if (verdict.kind == Verdict::Kind::missing) {
      std::erase_if(waiting, [&](int rank) { return std::ranges::count(verdict.numbers, rank); });
    }
    const auto soon = base::Deadline::after(
        std::min<std::chrono::milliseconds>(kFarewell, deadline_.remaining() + shm::kVerdict));
    for (const int rank : waiting) {
      await_keys(*store_, {key("heard", rank)}, [&] { return has_ended(rank) || soon.expired(); });
    }
  }

  Answer operator()(const std::atomic<bool>& cancelled) const {
    try {
      return gather(cancelled);
    } catch (const std::exception&) {
      // The store may have ended with the rank that serves it.
      auto lost = await_ended();
      if (lost.empty()) throw;
      return {{}, {Verdict::Kind::lost, std::move(lost)}};
    }
  }

 private:
  // The first rank that has a verdict sets it, and decides for all.
  static constexpr const char* kVerdictKey = "verdict";
  static std::string key(const char* what, int rank) { return fmt::format("{}{}", what, rank); }
  static std::vector<std::string> keys_of(const char* what, const std::vector<int>& ranks) {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(key(what, rank));
    return keys;
  }

  struct Record {
    int size;
    std::string blob;
  };
  // Of a rank that has come: its size, a space and its blob.
  Record read(int rank) const {
    const std::string text = store_->get_to_str(key("rank", rank));
    const char* const end = text.data() + text.size();
    int size = 0;
    const auto [behind, error] = std::from_chars(text.data(), end, size);
    if (error != std::errc() || behind == end || *behind != ' ' || size < 1) {
      Verdict::throw_malformed(text);
    }
    return {size, text.substr(static_cast<std::size_t>(behind - text.data()) + 1)};
  }

  std::vector<Record> read_all() const {
    std::vector<Record> records;
    for (const int rank : every_rank(size_)) records.push_back(read(rank));
    return records;
  }

  Answer gather(const std::atomic<bool>& cancelled) const {
    ask("announcing this rank in the store",
        [&] { store_->set(key("rank", rank_), fmt::format("{} {}", size_, blob_)); });
    std::optional<Verdict> own;
    base::WaitReport report;
    bool met_rank_0 = false;
    const auto keys = keys_of("rank", every_rank(size_));
    ask("waiting for the other ranks", [&] {
      await_keys(*store_, keys, [&] {
        if (cancelled || deadline_.expired() || store_->check({kVerdictKey})) return true;
        *answered_ = Clock::now();
        report.check([&](const std::string& waited, auto) { return describe_missing(waited); });
        own = find_obstacle(met_rank_0);
        return own.has_value();
      });
    });
    // check_peers knows more, and has thrown.
    if (cancelled && !deadline_.expired()) {
      report.abandon();
      return {};
    }
    Answer answer;
    std::vector<Record> records;
    ask("agreeing with the other ranks on who has come", [&] {
      if (!own) own = judge(records);
      answer.verdict = Verdict::decode(store_->compareSet(kVerdictKey, "", own->encode()));
    });
    Verdict& verdict = answer.verdict;
    if (verdict.kind == Verdict::Kind::complete) {
      const int other = verdict.numbers.front();
      if (other == size_) {
        ask("reading the other ranks' addresses from the store", [&] {
          if (records.empty()) records = read_all();
        });
        for (Record& record : records) answer.blobs.push_back(std::move(record.blob));
        return answer;
      }
      verdict = different_sizes(other);
    }
    report.abandon();
    part(verdict);
    return answer;
  }

  // Why ranks cannot meet, if that is known before all have come.
  std::optional<Verdict> find_obstacle(bool& met_rank_0) const {
    if (auto lost = find_lost(); !lost.empty()) {
      return Verdict{Verdict::Kind::lost, std::move(lost)};
    }
    if (met_rank_0 || !has_come(0)) return std::nullopt;
    met_rank_0 = true;
    const int size = read(0).size;
    return size == size_ ? std::nullopt : std::optional(different_sizes(size));
  }
  std::vector<int> find_missing() const {
    std::vector<int> missing;
    for (const int rank : every_rank(size_)) {
      if (!has_come(rank)) missing.push_back(rank);
    }
    return missing;
  }
  // The lowest rank that has come reports.
  std::optional<base::WaitReport::Text> describe_missing(const std::string& waited) const {
    const shm::RankSet missing(find_missing());
    const shm::RankSet here = shm::RankSet::all(size_) - missing;
    if (missing.empty() || *here.begin() != rank_) return std::nullopt;
    return base::WaitReport::Text{
        fmt::format("{} {} waited {} for {}, which {} not come to {}", global_ranks_.describe(here),
                    shm::has_or_have(here), waited, global_ranks_.describe(missing),
                    shm::has_or_have(missing), place_),
        place_};
  }
  // Reads the records of all ranks, if all have come.
  Verdict judge(std::vector<Record>& records) const {
    Verdict missing{Verdict::Kind::missing, find_missing()};
    if (!missing.numbers.empty()) return missing;
    records = read_all();
    for (const Record& record : records) {
      if (record.size != size_) return different_sizes(record.size);
    }
    return {Verdict::Kind::complete, {size_}};
  }
  Verdict different_sizes(int other) const {
    return {Verdict::Kind::sizes, {std::min(other, size_), std::max(other, size_)}};
  }

  bool has_come(int rank) const { return store_->check({key("rank", rank)}); }
  bool has_ended(int rank) const {
    const auto peer = static_cast<std::size_t>(rank);
    return processes_ && peer < processes_->peers.size() && processes_->peers[peer].ended();
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
      if (ended.empty()) std::this_thread::sleep_for(1ms);
    }
    return ended;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::string blob_;
  base::Deadline deadline_;
  std::shared_ptr<const shm::Membership> processes_;
  shm::GlobalRanks global_ranks_;
  std::string place_;
  std::shared_ptr<std::atomic<Clock::time_point>> answered_ =
      std::make_shared<std::atomic<Clock::time_point>>(Clock::now());
};

}  // namespace

std::vector<std::string> StoreExchange::all_gather(const std::string& blob,
                                                   const base::Deadline& deadline) {
  const Gathering gathering(request_, blob, deadline);
  base::WaitReport report;
  std::optional<Gathering::Answer> answer;
  std::exception_ptr loss;
  std::optional<base::Deadline> soon;
  const auto check_peers = [&] {
    if (!loss) {
      try {
        return request_.check_peers();
      } catch (const PeerLost&) {
        loss = std::current_exception();
        soon = base::Deadline::after(kLastBlob);
      }
    }
    if (soon->expired()) std::rethrow_exception(loss);
  };
  try {
    answer = call_store(deadline, gathering, [&] {
      check_peers();
      report_silence(report, *gathering.answered());
    });
  } catch (const StoreLost& error) {
    explain_lost_store(error.what(), *request_.store, request_.store_server, request_.check_peers);
  }
  if (!answer || answer->verdict.kind != Verdict::Kind::complete) report.abandon();
  const auto own_name = [&] {
    const int own = request_.global_ranks().of(rank());
    return request_.members.empty() ? fmt::format("rank {} of {}", own, size())
                                    : fmt::format("rank {}", own);
  };
  if (!answer) {
    const auto server = request_.store_server;
    throw Timeout(fmt::format("{}{} did not answer within the timeout of {} s; this is {}",
                              describe_store(*request_.store),
                              server ? fmt::format(", which rank {} serves,", *server) : "",
                              deadline.budget().count() / 1000.0, own_name()),
                  server ? std::vector{*server} : std::vector<int>{}, "connect", 0);
  }
  const auto& [kind, numbers] = answer->verdict;
  const shm::GlobalRanks global_ranks = request_.global_ranks();
  const bool world = request_.group_name == "world";
  switch (kind) {
    case Verdict::Kind::complete:
      return std::move(answer->blobs);
    case Verdict::Kind::lost:
      throw_lost(global_ranks, shm::RankSet(numbers));
    case Verdict::Kind::sizes:
      throw UsageError(fmt::format(
          "the ranks disagree on the size of {}: some were given {} ranks, others {}. Give all "
          "ranks the same {}",
          world ? "the world" : "group " + request_.group_name, numbers.front(), numbers.back(),
          world ? "world size (WORLD_SIZE, or .world_size)" : "list of ranks, or world size"));
    case Verdict::Kind::missing:
      break;
  }
  const shm::RankSet missing(numbers);
  throw Timeout(fmt::format("{} did not come to {} within the timeout of {} s; this is {}{}",
                            global_ranks.describe(missing), Gathering::place_of(request_),
                            deadline.budget().count() / 1000.0, own_name(),
                            is_of_new_group(request_.group_name)
                                ? "; all ranks of the world have to call new_group, in the same "
                                  "order"
                                : ""),
                global_ranks.of(missing).list(), "connect", 0);
}

void StoreExchange::report_silence(base::WaitReport& report,
                                   std::chrono::steady_clock::time_point answered) const {
  report.check([&](const std::string& waited, auto since) -> std::optional<base::WaitReport::Text> {
    if (rank() > base::WaitReport::kStrangers || answered > since) return std::nullopt;
    const std::string store = describe_store(*request_.store);
    return base::WaitReport::Text{fmt::format("rank {} has waited {}: {} does not answer yet",
                                              request_.global_ranks().of(rank()), waited, store),
                                  store};
  });
}

void StoreExchange::let_others_read() noexcept {
  try {
    const auto deadline = base::Deadline::after(kFarewell);
    call_store(deadline,
               [gathering = Gathering(request_, "", deadline), size = size()](const auto&) {
                 gathering.part({Verdict::Kind::complete, {size}});
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
