#include "distributed/reported_wait.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/start_thread.h"
#include "base/wait_report.h"
#include "distributed/process_state.h"
#include "distributed/store_calls.h"
#include "shm/membership/failure.h"

namespace paceline::distributed {
namespace {

using Milliseconds = std::chrono::milliseconds;
using base::WaitReport;

// Not every backend numbers its calls.
std::string describe_call(const c10d::Work& work, const c10d::ProcessGroup& group) {
  const std::string operation = c10d::opTypeToString(work.retrieveOpType());
  try {
    return fmt::format("{}, call {} of group {}", operation, work.getSequencenumber(),
                       group.getGroupName());
  } catch (const std::exception&) {
    return fmt::format("{} of group {}", operation, group.getGroupName());
  }
}

// This rank's wait, which it has counted in the store.
class CountedWait {
 public:
  // Throws if the group has ended, or has no store.
  CountedWait(const c10d::Work& work, const ProcessGroup& group)
      : store_(group.c10d()->getStore()),
        rank_(group.c10d()->getRank()),
        size_(group.c10d()->getSize()),
        call_(describe_call(work, *group.c10d())) {
    TORCH_CHECK(store_, "a group without a store");
    std::vector<int> members;
    for (int rank = 0; rank < size_; ++rank) members.push_back(global_rank_of(group, rank));
    global_ranks_ = shm::GlobalRanks(std::move(members));
    add(1);
  }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;
  ~CountedWait() { add(-1); }

  // Of the ranks that wait, the lowest reports.
  std::optional<WaitReport::Text> describe(const std::string& waited) const {
    const auto waiting = find_waiting();
    if (!waiting) {
      return text("rank {} has waited {} at {}; {}, which knows who waits, does not answer",
                  global_ranks_.of(rank_), waited, call_, describe_store(*store_));
    }
    if (*waiting->begin() != rank_) return std::nullopt;
    const std::string who =
        fmt::format("{} {}", global_ranks_.describe(*waiting), shm::has_or_have(*waiting));
    const shm::RankSet late = shm::RankSet::all(size_) - *waiting;
    if (late.empty()) {
      return text("{} waited {} at {}: every rank waits in a collective of the group", who, waited,
                  call_);
    }
    return text("{} waited {} for {} at {}", who, waited, global_ranks_.describe(late), call_);
  }

 private:
  static constexpr std::chrono::seconds kAnswer{1};

  template <typename... Args>
  WaitReport::Text text(fmt::format_string<Args...> format, Args&&... args) const {
    return {fmt::format(format, std::forward<Args>(args)...), call_};
  }

  static std::string key(int rank) { return fmt::format("waits {}", rank); }

  void add(int change) const noexcept {
    try {
      call_store(base::Deadline::after(kAnswer), [=, store = store_, rank = rank_](const auto&) {
        return store->add(key(rank), change);
      });
    } catch (const std::exception&) {
      // The store has ended: there will be a report without names, or none.
    }
  }

  // A type that the shared library does not export.
  struct Answer {
    std::optional<shm::RankSet> waiting{};
  };

  // Up to this rank, if a lower one waits; nothing if the store does not answer.
  std::optional<shm::RankSet> find_waiting() const {
    try {
      return call_store(base::Deadline::after(kAnswer),
                        [store = store_, me = rank_, size = size_](const auto& cancelled) {
                          shm::RankSet waiting;
                          for (int rank = 0; rank < size; ++rank) {
                            if (cancelled) return Answer();
                            if (rank == me || store->add(key(rank), 0) > 0) waiting.insert(rank);
                            if (rank == me && *waiting.begin() < me) break;
                          }
                          return Answer{waiting};
                        })
          .value_or(Answer())
          .waiting;
    } catch (const std::exception&) {
      return {};
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::string call_;
  shm::GlobalRanks global_ranks_;
};

// The header of its class needs CUDA's.
bool is_of_nccl(const c10d::Work& work) {
  return std::string_view(typeid(work).name()).find("WorkNCCL") != std::string_view::npos;
}

// Ends when `message` does, for which a thread waits. The message is aborted if the program drops
// this Work before.
class MessageOnThread final : public c10d::Work {
 public:
  static c10::intrusive_ptr<c10d::Work> start(const c10::intrusive_ptr<c10d::Work>& message) {
    auto work = c10::make_intrusive<MessageOnThread>(message);
    base::start_thread([message, weak = c10::weak_intrusive_ptr<MessageOnThread>(work)] {
      std::exception_ptr error;
      try {
        if (!message->wait()) throw Error("the message was aborted");
      } catch (const std::exception&) {
        error = std::current_exception();
      }
      if (const auto waiting = weak.lock()) waiting->finish(error);
    }).detach();
    return work;
  }
  explicit MessageOnThread(c10::intrusive_ptr<c10d::Work> message)
      : c10d::Work(-1, message->retrieveOpType()), message_(std::move(message)) {}

  int sourceRank() const override { return message_->sourceRank(); }
  std::uint64_t getSequencenumber() const override { return message_->getSequencenumber(); }
  void abort() override { message_->abort(); }
  // While the thread has its weak reference.
  void release_resources() override {
    if (!isCompleted()) message_->abort();
  }

 private:
  c10::intrusive_ptr<c10d::Work> message_;
};

bool is_message_of_gloo(const c10d::Work& work) {
  return c10d::isP2POp(work.retrieveOpType()) && !is_of_nccl(work) &&
         dynamic_cast<const SelfReportingWork*>(&work) == nullptr;
}

// Whether it is a message whose wait has ended: another one would wait for another message. Throws
// its error.
bool has_ended(c10d::Work& work) {
  if (!is_message_of_gloo(work) || !work.isCompleted()) return false;
  if (const auto error = work.exception()) std::rethrow_exception(error);
  return true;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> with_limited_wait(c10::intrusive_ptr<c10d::Work> work) {
  const bool is_limited = !is_message_of_gloo(*work) || work->isCompleted() ||
                          dynamic_cast<MessageOnThread*>(work.get()) != nullptr;
  return is_limited ? work : MessageOnThread::start(work);
}

bool wait_within(c10d::Work& work, Milliseconds time) {
  if (has_ended(work)) return true;
  const auto deadline = base::Deadline::after(time);
  if (is_of_nccl(work)) {  // whose wait with a time limit ends the group
    while (!work.isCompleted() && !deadline.expired()) std::this_thread::sleep_for(Milliseconds(1));
    if (!work.isCompleted()) return false;
    work.wait();
    return true;
  }
  try {
    work.wait(std::max(time, Milliseconds(1)));
    return true;
  } catch (const std::exception&) {  // of no one type over the backends
    if (!work.isCompleted() && deadline.expired()) return false;
  }
  work.wait();
  return true;
}

void wait_and_report(c10d::Work& work, const ProcessGroup& group) {
  if (has_ended(work)) return;
  // The timeout of a wait for Gloo's messages would end their connection. A wait without one for a
  // call of NCCL only makes the current stream wait.
  if (is_of_nccl(work) || work.isCompleted() || c10d::isP2POp(work.retrieveOpType()) ||
      dynamic_cast<SelfReportingWork*>(&work) != nullptr) {
    work.wait();
    return;
  }
  const auto forever = base::Deadline::after(base::Deadline::kLongest);
  WaitReport report;
  std::optional<CountedWait> counted;
  auto time = std::min(report.next_check(forever).remaining(), WaitReport::first.load() / 10);
  while (!wait_within(work, time)) {
    try {
      if (!counted) counted.emplace(work, group);
    } catch (const std::exception&) {  // nothing can be said
      work.wait();
      return;
    }
    report.check([&](const std::string& waited, auto) { return counted->describe(waited); });
    time = report.next_check(forever).remaining();
  }
}

}  // namespace paceline::distributed
