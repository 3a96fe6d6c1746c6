#include "internode/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <tuple>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "internode/call.h"
#include "internode/connect_leaders.h"
#include "shm/collectives/cross_wait.h"
#include "shm/kernels/kernels.h"

namespace paceline::internode {

using shm::RankSet;

namespace {

using namespace std::chrono_literals;

// Past its deadline, a leader learns for so long which ranks of other nodes are late: its questions
// are answered, or a node that finds a late rank of its own tells the failure. The other ranks of
// the node wait a little longer for what it says.
constexpr auto kQuestionTime = 1500ms;
constexpr auto kVerdictTime = 500ms;

// The streams of gathers.
constexpr std::uint32_t kCalls = 0;
constexpr std::uint32_t kFormation = 1;

// The end of a node's share of kCalls: how many threads its ranks use the group from.
constexpr char kOneThread = 1;
constexpr char kSeveralThreads = 2;

RankSet ranks_of(const std::vector<Engine::Message>& messages) {
  RankSet ranks;
  for (const Engine::Message& message : messages) ranks.insert(message.rank);
  return ranks;
}

std::span<const std::byte> bytes_of(const std::vector<std::uint64_t>& numbers) {
  return std::as_bytes(std::span(numbers));
}

}  // namespace

// A wait for other nodes, for a word of this rank.
class Group::Wait : public shm::WaitContext {
 public:
  explicit Wait(Group& group) : WaitContext(group.context(), group.deadline_), group_(group) {}
  RankSet missing() const override { return {}; }
  std::string describe() const override { return group_.describe_call(); }
  std::string describe_on_other_nodes(const RankSet& ranks) const override {
    return group_.global_ranks_.describe_global(ranks);
  }

  void check(int /*peer*/) const override {
    group_.set_awaited(missing_on_other_nodes());
    published_ = true;
  }

 protected:
  ~Wait() {
    if (published_) group_.set_awaited({});
  }
  // Past the deadline: true for so long.
  bool learns_for(std::chrono::milliseconds time) {
    if (!learning_) learning_ = base::Deadline::after(time);
    return !learning_->expired();
  }
  Group& group_;

 private:
  mutable bool published_ = false;
  std::optional<base::Deadline> learning_;
};

// A leader's wait for the calls of other nodes.
class Group::GatherWait final : public Wait {
 public:
  GatherWait(Group& group, const Topic& topic) : Wait(group), topic_(topic) {}

  RankSet missing_on_other_nodes() const override { return group_.links_->awaited(topic_); }
  bool may_learn_more() override { return learns_for(kQuestionTime); }
  void check(int peer) const override {
    Wait::check(peer);
    const RankSet left = group_.links_->awaited_that_left(topic_);
    if (left.empty()) return;
    group_.region()->fail(failure_of_left(group_.global_ranks_, left, describe()), op);
  }

 private:
  Topic topic_;
};

// A wait for a transfer between nodes.
class Group::TransferWait final : public Wait {
 public:
  TransferWait(Group& group, const Engine::Transfer& transfer, const RankSet& peers)
      : Wait(group), transfer_(transfer), peers_(peers) {}

  RankSet missing_on_other_nodes() const override {
    const auto rank = transfer_.awaited();
    return rank ? group_.global_ranks_.of(RankSet{*rank}) : peers_;
  }
  // These ranks may wait themselves, on their nodes. A node that does not run says nothing; then
  // the leader, which may wait for the leader there, is first.
  bool may_learn_more() override {
    return learns_for(kQuestionTime + (group_.map_.is_leader() ? 0ms : kVerdictTime));
  }

 private:
  const Engine::Transfer& transfer_;
  RankSet peers_;  // global
};

Group::Group(std::shared_ptr<shm::Region> region, NodeMap map, shm::GlobalRanks ranks,
             NodeLinks::Connections connections, std::unique_ptr<Engine> engine)
    : Collectives(region->options().timeout),
      local_(std::move(region)),
      map_(std::move(map)),
      global_ranks_(std::move(ranks)),
      streams_(kFormation),
      engine_(std::move(engine)) {
  for (int node = 0; node < map_.nodes(); ++node) {
    const auto& parts = map_.parts(node);
    for (std::size_t part = 0; part < parts.size(); ++part) {
      parts_.push_back({node, part, parts[part].first_leaf()});
    }
    most_parts_ = std::max(most_parts_, parts.size());
  }
  if (parts_.size() > shm::kMaxSources) {
    throw UsageError(fmt::format(
        "group {} of {} ranks on {} nodes: its sums have {} parts, and at most {} are possible. "
        "There are fewer if the ranks of a node follow each other, and if it has 2, 4, 8, ... of "
        "them",
        local_.region()->options().name, size(), map_.nodes(), parts_.size(), shm::kMaxSources));
  }
  std::ranges::sort(parts_, {}, &PartOfSum::first_leaf);
  // First, so that a failure from here on becomes known on all nodes.
  if (map_.is_leader()) {
    links_ =
        std::make_unique<NodeLinks>(local_.region(), map_, global_ranks_, std::move(connections),
                                    [this](const Topic& topic) { return find_late(topic); });
  }
  show_call();
  local_.set_timeout(timeout() + kLeaderGrace);
  board_ = &share<Board>();
  // Now every rank has its engine, which others may connect to.
  if (map_.is_leader()) gather_texts({kFormation, 0}, "");
  local_.barrier();
  local_.set_timeout(timeout());
}

Group::~Group() {
  // Its threads and locks are the parent's.
  if (region()->in_forked_child()) std::ignore = engine_.release();
}

// In the leader's memory, which the node's other ranks have mapped.
void* Group::share_bytes(std::size_t bytes) {
  const auto& region = local_.region();
  std::uint64_t offset = 0;
  if (local_.rank() == 0) {
    void* const memory = region->allocate_or_throw(bytes);
    std::memset(memory, 0, bytes);
    offset = *region->memory().shared_offset(memory, bytes);
  }
  local_.broadcast(&offset, sizeof(offset), shm::DataType::byte, 0);
  if (std::byte* const memory = region->memory().resolve(0, offset, bytes)) return memory;
  throw Error(fmt::format("rank {} published memory that is not its own (offset {})",
                          region->global_ranks().of(0), offset));
}

// The ranks of this node for which a gather waits. If this one, the leader, has not come because it
// waits for others itself, only they are late.
RankSet Group::find_late(const Topic& topic) const {
  const shm::GlobalRanks& ranks = region()->global_ranks();
  const Board* const board = board_;
  RankSet late;
  for (int rank = 0; board && topic.stream == kCalls && rank < local_.size(); ++rank) {
    const shm::Word& arrived = board->ranks[static_cast<std::size_t>(rank)].arrived;
    if (!shm::Region::reached(arrived, static_cast<std::uint32_t>(topic.number))) {
      late.insert(ranks.of(rank));
    }
  }
  if (!late.empty() && !late.contains(ranks.of(0))) return late;
  const RankSet behind = shm::ranks_behind(*region());
  return behind.empty() ? late : ranks.of(behind);
}

std::string Group::describe_call() const {
  const std::string& name = local_.region()->options().name;
  if (call_.sequence == 0) return "forming group " + name;
  return fmt::format("{}, call {} of group {}", describe(call_, global_ranks_), call_.sequence,
                     name);
}

void Group::show_call() {
  shm::CollectiveFingerprint shown = call_;
  shown.across_nodes = 1;
  shown.root = global_ranks_.of(call_.root);
  local_.show(shown);
}

Group::Call::Call(Group& group, shm::CollectiveFingerprint call, const OwnSplits* splits)
    : group_(group) {
  check_arguments(call, group.size());
  call.sequence = group.call_.sequence + 1;
  group.call_ = call;
  group.show_call();
  group.begin_deadline();
  group.local_.set_outer_call(this);
  try {
    group.agree(splits);
  } catch (...) {
    group.local_.set_outer_call(nullptr);
    group.tell_failure();
    throw;
  }
}

shm::OpContext Group::Call::context() const {
  return group_.context();
}
shm::CallDeadline& Group::Call::deadline() {
  return group_.deadline_;
}
std::string Group::Call::describe() const {
  return group_.describe_call();
}
RankSet Group::Call::missing_on_other_nodes(const RankSet& missing) const {
  RankSet awaited;
  for (const int rank : missing) {
    // What a rank waited for when it was stopped does not matter.
    if (!group_.region()->peers().describe_stop(rank).empty()) return {};
    awaited |= group_.awaited(rank).load();
  }
  return awaited;
}
bool Group::Call::may_learn_more(const RankSet& missing) {
  if (missing_on_other_nodes(missing).empty()) return false;
  if (!learning_) learning_ = base::Deadline::after(kQuestionTime + kVerdictTime);
  return !learning_->expired();
}
std::string Group::Call::describe_on_other_nodes(const RankSet& ranks) const {
  return group_.global_ranks_.describe_global(ranks);
}

void Group::agree(const OwnSplits* splits) {
  auto& arrived = board_.load()->ranks[static_cast<std::size_t>(local_.rank())].arrived;
  arrived.store(static_cast<std::uint32_t>(call_.sequence), std::memory_order_release);
  std::string share;
  const auto collect = [&](std::span<const std::byte> own) {
    const std::size_t before = share.size();
    std::vector<shm::Output> parts;
    if (map_.is_leader()) {
      share.resize(before + own.size() * local_size());
      for (std::size_t rank = 0; rank < local_size(); ++rank) {
        parts.push_back({share.data() + before + rank * own.size(), own.size()});
      }
    }
    local_.gather({own.data(), own.size()}, parts, shm::DataType::byte, 0);
  };
  collect(std::as_bytes(std::span(&call_, 1)));
  if (map_.is_leader() && splits != nullptr) {
    // Ranks that make another call would not take part in collecting the splits.
    std::vector<shm::CollectiveFingerprint> calls(local_size());
    std::memcpy(calls.data(), share.data(), share.size());
    if (!shm::agree(calls)) {
      const auto found = explain_disagreement(calls, local_.global_ranks());
      RankSet ranks;
      for (const int rank : found.ranks) ranks.insert(map_.rank_at(map_.node(), rank));
      fail(ranks, found.text);
    }
  }
  if (splits != nullptr) {
    collect(bytes_of(splits->to));
    collect(bytes_of(splits->from));
  }
  if (map_.is_leader()) {
    share += uses_one_thread() ? kOneThread : kSeveralThreads;
    compare(gather_texts({kCalls, call_.sequence}, std::move(share)), splits != nullptr);
  }
  local_.barrier();
}

bool Group::uses_one_thread() const {
  shm::Region& region = *local_.region();
  for (int rank = 0; rank < region.size(); ++rank) {
    if (!region.threads().is_one(rank)) return false;
  }
  return true;
}

std::optional<Group::CallElsewhere> Group::call_elsewhere() const {
  CallElsewhere found;
  for (const auto& [node, share] : links_->unanswered(kCalls)) {
    if (share.size() < sizeof(found.call) || share.back() != kOneThread) return std::nullopt;
    std::memcpy(&found.call, share.data(), sizeof(found.call));
    const auto& ranks = map_.ranks_on(node);
    found.ranks.insert(found.ranks.end(), ranks.begin(), ranks.end());
  }
  if (found.ranks.empty() || !uses_one_thread()) return std::nullopt;
  return found;
}

std::vector<std::string> Group::gather_texts(const Topic& topic, std::string own) {
  const std::uint32_t number = gathered_ + 1;
  links_->gather(topic, std::move(own), [this, number] { region()->publish(gathered_, number); });
  GatherWait wait(*this, topic);
  region()->await(gathered_, number, local_.rank(), wait);
  return links_->take(topic);
}

void Group::compare(const std::vector<std::string>& shares, bool uneven) {
  const auto all = static_cast<std::size_t>(size());
  std::vector<shm::CollectiveFingerprint> calls(all);
  std::vector<OwnSplits> splits(uneven ? all : 0);
  for (int node = 0; node < map_.nodes(); ++node) {
    const std::string& share = shares[static_cast<std::size_t>(node)];
    const std::size_t ranks = map_.ranks_on(node).size();
    const std::size_t row = all * sizeof(std::uint64_t);
    const std::size_t calls_size = ranks * sizeof(shm::CollectiveFingerprint);
    const bool has_splits = share.size() == calls_size + 2 * ranks * row + 1;
    if (share.size() != calls_size + 1 && !has_splits) {
      fail({map_.leader_of(node)},
           fmt::format("node {} sent an invalid description of {} bytes", node, share.size()));
    }
    for (std::size_t local = 0; local < ranks; ++local) {
      const auto rank = static_cast<std::size_t>(map_.rank_at(node, static_cast<int>(local)));
      std::memcpy(&calls[rank], share.data() + local * sizeof(calls[rank]), sizeof(calls[rank]));
      if (!uneven || !has_splits) continue;
      splits[rank].to.resize(all);
      splits[rank].from.resize(all);
      std::memcpy(splits[rank].to.data(), share.data() + calls_size + local * row, row);
      std::memcpy(splits[rank].from.data(), share.data() + calls_size + (ranks + local) * row, row);
    }
  }
  if (!shm::agree(calls)) {
    const auto found = explain_disagreement(calls, global_ranks_);
    fail(found.ranks, found.text);
  }
  if (!uneven) return;
  std::vector<shm::SplitRow> rows;
  for (const OwnSplits& one : splits) rows.push_back({one.to, one.from});
  const auto found = compare_splits(rows, global_ranks_);
  if (found.ranks.empty()) return;
  fail(found.ranks, describe(call_, global_ranks_) + ": " + found.text);
}

void Group::fail(const RankSet& ranks, const std::string& text) {
  region()->fail(
      {shm::FailureKind::mismatch, global_ranks_.of(ranks),
       fmt::format("{}; call {} of group {}", text, call_.sequence, region()->options().name)},
      context());
}

Group::Exchange::Exchange(Group& group, const Messages& sends, const Messages& receives,
                          std::uint32_t number)
    : Exchange(group, ranks_of(sends) |= ranks_of(receives), [&](std::function<void()> when_done) {
        constexpr std::uint32_t kNumbers = 1 << 12;  // of a call
        constexpr std::uint32_t kCallsApart = 1 << 16;
        const auto call = static_cast<std::uint32_t>(group.call_.sequence % kCallsApart);
        return group.engine_->start(call * kNumbers + number % kNumbers, sends, receives,
                                    std::move(when_done));
      }) {}

Group::Exchange::Exchange(Group& group, const RankSet& peers, const Start& start)
    : group_(group), peers_(group.global_ranks_.of(peers)) {
  if (peers_.empty()) return;
  try {
    transfer_ = start([this] { group_.region()->publish(done_, 1); });
  } catch (const std::exception& error) {
    group_.fail_transfer(error, peers_, false);
  }
}

void Group::Exchange::finish() {
  if (!transfer_) return;
  {
    TransferWait wait(group_, *transfer_, peers_);
    group_.region()->await(done_, 1, group_.local_.rank(), wait);
  }
  const auto transfer = std::move(transfer_);
  try {
    transfer->check();
  } catch (const std::exception& error) {
    group_.fail_transfer(error, peers_, true);
  }
}

void Group::tell_failure() noexcept {
  try {
    if (links_) links_->tell_failure();
  } catch (const std::exception&) {  // no memory
  }
}

void Group::exchange(const Messages& sends, const Messages& receives, std::uint32_t number) {
  Exchange(*this, sends, receives, number).finish();
}

// If it has not started and no rank is lost, this rank lacks memory or a thread, and its peers are
// not to blame. Otherwise the engine has noticed that a rank is lost, but not which, and before the
// leaders know.
void Group::fail_transfer(const std::exception& error, const RankSet& peers, bool has_started) {
  const bool is_own = !has_started && dynamic_cast<const PeerLost*>(&error) == nullptr;
  const auto limit = base::Deadline::after(is_own ? 0ms : kCauseTime);
  while (!limit.expired()) {
    region()->check_peers({}, context());
    region()->listen(region()->rings());
  }
  const RankSet own = global_ranks_.of(RankSet{rank()});
  const std::string exchange = "the exchange with " + global_ranks_.describe_global(peers);
  region()->fail(
      {shm::FailureKind::peer_lost, is_own ? own : culprits_of(error, peers),
       fmt::format("{} in {}: {}",
                   is_own ? global_ranks_.describe_global(own) + " cannot begin " + exchange
                          : exchange + " failed",
                   describe_call(), error.what())},
      context());
}

Group::OwnSplits Group::splits_of(std::span<const shm::Input> to,
                                  std::span<const shm::Output> from) const {
  OwnSplits splits;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(size()); ++rank) {
    splits.to.push_back(to[to.size() == 1 ? 0 : rank].count);
    splits.from.push_back(from[from.size() == 1 ? 0 : rank].count);
  }
  return splits;
}

void Group::barrier() {
  const Call call(*this, {.operation = shm::Operation::barrier});
}

}  // namespace paceline::internode
