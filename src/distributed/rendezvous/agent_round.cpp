#include "distributed/rendezvous/agent_round.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/start_thread.h"
#include "base/wait_report.h"
#include "distributed/store_calls.h"
#include "distributed/topology.h"
#include "distributed/translate.h"
#include "launch/job.h"

namespace paceline::distributed {
namespace {

// Counts what the other ranks have written.
constexpr const char* kWritten = "written";

std::string word_of(int rank) {
  return fmt::format("word of {}", rank);
}
std::string answer_to(const std::string& word) {
  return "answer to " + word;
}
std::string receipt_of(int rank, const std::string& name) {
  return fmt::format("receipt of {} for {}", rank, name);
}

void put_and_count(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, value);
  store.add(kWritten, 1);
}

// Rank 0's answers.
class Answers {
 public:
  Answers(c10::intrusive_ptr<c10d::Store> store, std::string name, int size)
      : store_(std::move(store)), name_(std::move(name)) {
    for (const int rank : every_rank(size)) waiting_.insert(rank);
    waiting_.erase(0);
  }

  void operator()(const std::atomic<bool>& cancelled) {
    std::optional<std::int64_t> seen;
    poll_until(
        [&] {
          const std::int64_t written = store_->add(kWritten, 0);
          if (std::exchange(seen, written) != written) {
            std::erase_if(waiting_, [&](int rank) { return has_name(rank); });
          }
          return waiting_.empty();
        },
        [&] { return cancelled.load(); });
  }

 private:
  // Answers the rank, if it has a new word. One that has the name has a new word only for its next
  // world: it writes the receipt before, so the word is read before the receipt.
  bool has_name(int rank) {
    if (!store_->check({word_of(rank)})) return false;
    const std::string word = store_->get_to_str(word_of(rank));
    if (store_->check({receipt_of(rank, name_)})) return true;
    if (std::exchange(words_[rank], word) != word) store_->set(answer_to(word), name_);
    return false;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  std::set<int> waiting_;
  std::map<int, std::string> words_;
};

// Another rank. Empty if it is cancelled.
std::string ask_rank_0(c10d::Store& store, int rank, const std::atomic<bool>& cancelled) {
  const std::string word = launch::random_run_id();
  put_and_count(store, word_of(rank), word);
  const auto is_answered = [&] { return store.check({answer_to(word)}); };
  if (!poll_until(is_answered, [&] { return cancelled.load(); })) return "";
  std::string name = store.get_to_str(answer_to(word));
  put_and_count(store, receipt_of(rank, name), "");
  return name;
}

std::string get_name(const BackendRequest& request) {
  const auto deadline = base::Deadline::after(request.timeout);
  const shm::GlobalRanks global_ranks = request.global_ranks();
  base::WaitReport report;
  std::optional<std::string> name;
  try {
    name = call_store(
        deadline,
        [store = request.store, rank = request.rank](const auto& cancelled) {
          return ask_rank_0(*store, rank, cancelled);
        },
        [&] {
          request.check_peers();
          report.check([&](const std::string& waited,
                           auto) -> std::optional<base::WaitReport::Text> {
            if (request.rank > base::WaitReport::kStrangers) return std::nullopt;
            return base::WaitReport::Text{
                fmt::format("rank {} has waited {} for {}, which has not come to the rendezvous",
                            global_ranks.of(request.rank), waited, global_ranks.describe({0})),
                "the rendezvous"};
          });
        });
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(fmt::format("rank {} cannot use {}: {}", global_ranks.of(request.rank),
                            describe_store(*request.store), current_exception_text()));
  }
  if (name && !name->empty()) return *name;
  report.abandon();
  throw Timeout(
      fmt::format("{} within the timeout of {} s; this is rank {} of {}",
                  name ? global_ranks.describe({0}) + " did not come to the rendezvous"
                       : describe_store(*request.store) + " did not answer",
                  deadline.budget().count() / 1000.0, global_ranks.of(request.rank), request.size),
      name ? std::vector{global_ranks.of(0)} : std::vector<int>(), "connect", 0);
}

}  // namespace

AgentRound::AgentRound(const BackendRequest& request) : store_(request.store) {
  if (request.rank != 0) {
    name_ = get_name(request);
    return;
  }
  name_ = launch::random_run_id();
  std::packaged_task<void()> task([answers = Answers(store_, name_, request.size),
                                   cancelled = cancelled_]() mutable { answers(*cancelled); });
  answered_ = task.get_future();
  thread_ = base::start_thread(std::move(task));
}

// The store may block the thread for ever.
AgentRound::~AgentRound() {
  if (!thread_.joinable()) return;
  *cancelled_ = true;
  const bool has_ended = answered_.wait_for(std::chrono::seconds(1)) == std::future_status::ready;
  has_ended ? thread_.join() : thread_.detach();
}

c10::intrusive_ptr<c10d::Store> AgentRound::group_store() const {
  return c10::make_intrusive<c10d::PrefixStore>(name_, store_);
}

}  // namespace paceline::distributed
