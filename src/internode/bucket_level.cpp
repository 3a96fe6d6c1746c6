#include "internode/bucket_level.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "internode/bucket_tags.h"
#include "internode/call.h"
#include "internode/node_links.h"
#include "shm/buckets/waits.h"
#include "shm/collectives/fingerprint.h"

namespace paceline::internode {

using shm::RankSet;
using shm::Slice;

namespace {

// How long an exception's text may take to come from a rank that it ends.
constexpr std::chrono::seconds kTextTime{1};

// All nodes have come, so that waits within a node are short from here on.
std::shared_ptr<Group> in_step(std::shared_ptr<Group> group) {
  group->barrier();
  return group;
}

std::int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

Topic topic_of(std::uint32_t stream, std::uint32_t step, std::uint32_t phase) {
  constexpr std::uint64_t kPhases = 4;  // of a step's gathers, at most
  return {stream, step * kPhases + phase};
}

}  // namespace

// On a leader.
class BucketLevel::GatherStage final : public Stage {
 public:
  GatherStage(BucketLevel& level, const Collection& what, std::span<const std::byte> mine,
              std::shared_ptr<std::byte> all)
      : level_(level),
        what_(what),
        topic_(topic_of(level.stream_, what.step, what.phase)),
        bytes_of_rank_(mine.size() / level.here().size()),
        all_(std::move(all)) {
    const Board& board = level_.board_;
    const bool may_be_left = board.aborted != 0 && board.started != 0;
    const std::uint32_t epoch = board.epoch + (may_be_left ? 1U : 0U);
    std::string share(reinterpret_cast<const char*>(&epoch), sizeof(epoch));
    share.append(reinterpret_cast<const char*>(mine.data()), mine.size());
    level.group_->links().gather(topic_, std::move(share), level.ring_and_set(done_));
  }

  State poll() override {
    if (!*done_) return level_.is_aborted(what_.step) ? State::aborted : State::under_way;
    const auto shares = level_.group_->links().take(topic_);
    std::uint32_t epoch = 0;
    for (int node = 0; node < level_.map().nodes(); ++node) {
      epoch = std::max(epoch, read(node, shares[static_cast<std::size_t>(node)]));
    }
    // The node's other ranks read it once the reports are published.
    if (epoch != level_.board_.epoch) {
      level_.board_.epoch = epoch;
      level_.board_.aborted = 0;
      level_.board_.started = 0;
    }
    return State::complete;
  }
  void cancel() noexcept override {}
  RankSet awaited() const override { return level_.group_->links().awaited(topic_); }
  RankSet at_fault() const override { return level_.at_fault(what_.step); }
  bool rings() const override { return true; }
  void check() override {
    if (*done_ || level_.is_aborted(what_.step)) return;
    const RankSet left = level_.group_->links().awaited_that_left(topic_);
    if (!left.empty()) {
      throw PeerLost(fmt::format("{} {} left the group: {}; {}", describe(left),
                                 shm::has_or_have(left), shm::kLeftAdvice, shm::kUnevenAdvice),
                     left.list(), op().operation, what_.step);
    }
    const auto elsewhere = level_.group_->call_elsewhere();
    if (!elsewhere) {
      seen_elsewhere_.reset();
      return;
    }
    // Another thread's first call may come.
    if (!seen_elsewhere_) seen_elsewhere_ = base::Deadline::after(std::chrono::seconds(1));
    if (!seen_elsewhere_->expired()) return;
    const shm::GlobalRanks& global = level_.group_->global_ranks();
    const RankSet there = global.of(RankSet(elsewhere->ranks));
    const RankSet here = RankSet(level_.ranks_) - there;
    throw Mismatch(
        fmt::format("{} {} for all ranks in {}, call {}, while {} {} for them in this step: {}",
                    describe(there), there.count() == 1 ? "waits" : "wait",
                    shm::describe(elsewhere->call, global), elsewhere->call.sequence,
                    describe(here), here.count() == 1 ? "waits" : "wait", shm::kUnevenAdvice),
        minority(there, here).list(), op().operation, what_.step);
  }

 private:
  shm::OpContext op() const { return {"backward", what_.step}; }
  std::string describe(const RankSet& ranks) const {
    return level_.group_->global_ranks().describe_global(ranks);
  }
  // The smaller of the two; both if there is none.
  static RankSet minority(const RankSet& one, const RankSet& other) {
    if (one.count() == other.count()) return RankSet(one) |= other;
    return one.count() < other.count() ? one : other;
  }

  // Returns the node's epoch.
  std::uint32_t read(int node, const std::string& share) {
    std::uint32_t epoch = 0;
    const auto& ranks = level_.map().ranks_on(node);
    const std::size_t expected = sizeof(epoch) + ranks.size() * bytes_of_rank_;
    if (share.size() != expected) {
      throw Mismatch(fmt::format("node {} sent {} bytes about its {} ranks, and {} were expected",
                                 node, share.size(), ranks.size(), expected),
                     level_.group_->global_ranks().of(RankSet(ranks)).list(), "backward",
                     what_.step);
    }
    std::memcpy(&epoch, share.data(), sizeof(epoch));
    const char* next = share.data() + sizeof(epoch);
    for (const int rank : ranks) {
      std::memcpy(all_.get() + static_cast<std::size_t>(rank) * bytes_of_rank_, next,
                  bytes_of_rank_);
      next += bytes_of_rank_;
    }
    return epoch;
  }

  BucketLevel& level_;
  Collection what_;
  Topic topic_;
  std::size_t bytes_of_rank_;
  std::shared_ptr<std::byte> all_;
  std::shared_ptr<std::atomic<bool>> done_ = std::make_shared<std::atomic<bool>>(false);
  std::optional<base::Deadline> seen_elsewhere_;  // other nodes in a call, for a second
};

// What the engine may access while it reduces a lane, beside the reducer's buffer. It is the same
// in every step, so it is kept: fresh memory costs a page fault for every 4 KiB.
class BucketLevel::LaneMemory {
 public:
  // The buffer lives until the reduction is complete, or the engine has no use of it any more.
  void begin(std::shared_ptr<std::byte> buffer) {
    buffer_ = std::move(buffer);
    used_ = 0;
  }
  void end() { buffer_.reset(); }
  std::byte* allocate(std::size_t bytes) {
    if (used_ == blocks_.size()) {
      blocks_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
    }
    return blocks_[used_++].get();
  }

 private:
  std::shared_ptr<std::byte> buffer_;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;  // in the order of the calls
  std::size_t used_ = 0;
};

// Phase 0 exchanges the nodes' sums, of the whole lane or of a slice for each node; phase 1, where
// there are slices, their results.
class BucketLevel::LaneStage final : public Stage {
 public:
  LaneStage(BucketLevel& level, const LaneReduction& what, std::shared_ptr<std::byte> buffer)
      : level_(level),
        what_(what),
        epoch_(level.board_.epoch),
        element_(element_size(what.type)),
        buffer_(buffer.get()),
        division_(level.group_->divide_lane(what.count, what.type)),
        memory_(std::move(level.memory_[what.bucket])) {
    if (!memory_) memory_ = std::make_shared<LaneMemory>();
    memory_->begin(std::move(buffer));
    start_if_possible();
  }
  ~LaneStage() override { cancel(); }

  State poll() override {
    start_if_possible();
    if (!transfer_ || !*done_ || !arrived()) {
      return level_.is_aborted(what_.step) ? State::aborted : State::under_way;
    }
    transfer_.reset();
    if (phase_ == 0) {
      complete();
      if (!division_.whole) {
        send_results();
        return State::under_way;
      }
    }
    memory_->end();
    level_.memory_[what_.bucket] = std::move(memory_);
    return State::complete;
  }

  void cancel() noexcept override {
    if (!transfer_) return;
    try {
      transfer_->abandon(memory_);
    } catch (const std::exception&) {
      // No memory: the engine is of no use any more, and later steps fail.
    }
    transfer_.reset();
  }
  RankSet awaited() const override {
    const auto known = transfer_ ? transfer_->awaited() : level_.unmatched_->awaited();
    RankSet ranks;
    for (const int node : level_.other_nodes_) {
      const int rank = level_.map().rank_at(node, what_.lane);
      if (known.value_or(rank) == rank) ranks.insert(level_.group_->global_ranks().of(rank));
    }
    return ranks;
  }
  RankSet at_fault() const override { return level_.at_fault(what_.step); }
  bool rings() const override { return true; }

 private:
  using Messages = std::vector<Engine::Message>;

  Slice slice(int node) const { return division_.slice({0, what_.count}, node); }
  Slice own_slice() const { return slice(level_.map().node()); }
  void add(Messages& messages, int node, std::byte* data, std::size_t count) const {
    if (count == 0) return;
    messages.push_back({level_.map().rank_at(node, what_.lane), data, count * element_});
  }
  std::byte* at(const Slice& part) const { return buffer_ + part.begin * element_; }

  void start(const Messages& sends, const Messages& receives, std::uint32_t phase) {
    const std::uint32_t tag = tag_of(epoch_, what_.step, what_.bucket, phase);
    phase_ = phase;
    done_ = std::make_shared<std::atomic<bool>>(false);
    level_.board_.started.store(1, std::memory_order_relaxed);
    level_.unmatched_->add(tag, sends, receives);
    transfer_ = level_.engine_->start(tag, sends, receives, level_.ring_and_set(done_));
  }

  // The sums of a slice, for one part of this node after the other.
  std::byte* sums_of(const Slice& part) {
    const std::size_t parts = level_.parts_.size();
    if (parts == 1 || part.count() == what_.count) return at(part);
    const std::size_t bytes = part.count() * element_;
    std::byte* const packed = memory_->allocate(parts * bytes);
    for (std::size_t k = 0; k < parts; ++k) {
      std::memcpy(packed + k * bytes, at(part) + k * what_.count * element_, bytes);
    }
    return packed;
  }

  void start_if_possible() {
    const bool possible = level_.unmatched_->advance();
    if (!transfer_ && possible && !level_.is_aborted(what_.step)) send_sums();
  }

  void send_sums() {
    Messages sends;
    Messages receives;
    const NodeMap& map = level_.map();
    const Slice own = own_slice();
    sums_.resize(static_cast<std::size_t>(map.nodes()));
    sums_[static_cast<std::size_t>(map.node())] = sums_of(own);
    for (const int node : level_.other_nodes_) {
      const Slice theirs = slice(node);
      add(sends, node, sums_of(theirs), level_.parts_.size() * theirs.count());
      const std::size_t expected = map.parts(node).size() * own.count();
      std::byte* const received = memory_->allocate(expected * element_);
      add(receives, node, received, expected);
      sums_[static_cast<std::size_t>(node)] = received;
    }
    start(sends, receives, 0);
  }

  void complete() {
    const Slice own = own_slice();
    if (own.count() == 0) return;
    level_.group_->complete(sums_, what_.type, what_.op, own.count(), at(own));
  }

  void send_results() {
    Messages sends;
    Messages receives;
    const Slice own = own_slice();
    for (const int node : level_.other_nodes_) {
      const Slice theirs = slice(node);
      add(sends, node, at(own), own.count());
      add(receives, node, at(theirs), theirs.count());
    }
    start(sends, receives, 1);
  }

  // Whether the transfer that is done has moved everything. If it has failed, gives the leaders
  // time to learn why.
  bool arrived() {
    if (!cause_deadline_) {
      try {
        transfer_->check();
        return true;
      } catch (const std::exception& error) {
        why_ = error.what();
        culprits_ = culprits_of(error, awaited());
        cause_deadline_ = base::Deadline::after(kCauseTime);
      }
    }
    level_.region().check_peers({}, {"backward", what_.step});
    if (!cause_deadline_->expired()) return false;
    throw PeerLost(why_, culprits_.list(), "backward", what_.step);
  }

  BucketLevel& level_;
  LaneReduction what_;
  std::uint32_t epoch_;
  std::size_t element_;
  std::byte* buffer_;
  Group::Division division_;
  std::shared_ptr<LaneMemory> memory_;
  std::vector<const std::byte*> sums_;  // by node, of this node's slice
  std::uint32_t phase_ = 0;
  std::shared_ptr<std::atomic<bool>> done_;
  std::unique_ptr<Engine::Transfer> transfer_;
  std::string why_;  // the transfer failed
  RankSet culprits_;
  std::optional<base::Deadline> cause_deadline_;
};

BucketLevel::BucketLevel(std::shared_ptr<Group> group, std::unique_ptr<Engine> engine)
    : group_(in_step(std::move(group))),
      engine_(std::move(engine)),
      stream_(group_->new_stream()),
      board_(group_->share<Board>()) {
  for (int rank = 0; rank < map().size(); ++rank) {
    ranks_.push_back(group_->global_ranks().of(rank));
    nodes_.push_back(map().node_of(rank));
  }
  for (int node = 0; node < map().nodes(); ++node) {
    if (node != map().node()) other_nodes_.push_back(node);
  }
  for (const NodeMap::Part& part : map().parts(map().node())) {
    auto& local = parts_.emplace_back();
    for (const int rank : part.ranks) local.push_back(map().local_rank_of(rank));
  }
  connect_lane();
  register_for_aborts();
}

BucketLevel::~BucketLevel() {
  unregister();
}

// A rank may abort a step before it starts a transfer that another waits to connect for.
void BucketLevel::connect_lane() {
  const Group::Call call(*group_, {.operation = shm::Operation::barrier});
  const int lane = map().local_rank();
  if (lane >= lanes()) return;
  std::vector<int> peers;
  for (const int node : other_nodes_) peers.push_back(map().rank_at(node, lane));
  unmatched_ = std::make_unique<UnmatchedMessages>(
      *engine_, peers, [region = group_->region()] { region->ring(region->rank()); });
  Group::Exchange(*group_, RankSet(peers), [&](std::function<void()> when_done) {
    return engine_->connect(peers, std::move(when_done));
  }).finish();
}

void BucketLevel::register_for_aborts() {
  if (map().is_leader()) {
    group_->links().on_abort(stream_, [this](const Aborted& aborted) { note_abort(aborted); });
  }
  try {
    group_->barrier();
  } catch (...) {
    unregister();
    throw;
  }
  // From here on, other nodes may abort steps.
}

void BucketLevel::unregister() {
  if (map().is_leader()) group_->links().on_abort(stream_, nullptr);
}

std::unique_ptr<BucketLevel::Stage> BucketLevel::gather(const Collection& what,
                                                        std::span<const std::byte> mine,
                                                        std::shared_ptr<std::byte> all) {
  return std::make_unique<GatherStage>(*this, what, mine, std::move(all));
}

std::unique_ptr<BucketLevel::Stage> BucketLevel::start(const LaneReduction& what,
                                                       std::shared_ptr<std::byte> buffer) {
  if (what.bucket >= kMaxBuckets) {
    throw UsageError(fmt::format("bucket {}: across nodes there are at most {}; make them larger",
                                 what.bucket, kMaxBuckets));
  }
  unmatched_->begin_step(what.step, board_.epoch);
  return std::make_unique<LaneStage>(*this, what, std::move(buffer));
}

// All ranks of a node abort a step that one of them aborts.
void BucketLevel::abort(std::uint32_t step, const RankSet& at_fault, bool gone) noexcept {
  board_.aborted = 1;
  if (!map().is_leader()) return;
  try {
    group_->links().abort({{stream_, step}, at_fault, static_cast<std::uint8_t>(gone)});
  } catch (const std::exception&) {
    // No memory: the other nodes wait until their time is over.
  }
}

std::function<void()> BucketLevel::ring_and_set(std::shared_ptr<std::atomic<bool>> flag) const {
  return [flag = std::move(flag), region = group_->region()] {
    *flag = true;
    region->ring(region->rank());
  };
}

// If its place is taken by a later step, other nodes are so far ahead that they aborted this one
// too.
bool BucketLevel::is_aborted(std::uint32_t step) const {
  const Board::Abort& abort = abort_of(step);
  const std::uint32_t next = abort.next_step.load(std::memory_order_acquire);
  return next != 0 && static_cast<std::int32_t>(next - (step + 1)) >= 0 &&
         now() >= abort.from.load(std::memory_order_relaxed);
}

RankSet BucketLevel::at_fault(std::uint32_t step) const {
  const Board::Abort& abort = abort_of(step);
  const RankSet ranks = abort.at_fault.load();
  // After them, as some may be a later step's.
  return abort.next_step.load(std::memory_order_relaxed) == step + 1 ? ranks : RankSet();
}

// The first node that says so wins.
void BucketLevel::note_abort(const Aborted& aborted) {
  const auto step = static_cast<std::uint32_t>(aborted.step.number);
  Board::Abort& abort = abort_of(step);
  if (static_cast<std::int32_t>(abort.next_step - (step + 1)) >= 0 && abort.next_step != 0) return;
  abort.next_step.store(0, std::memory_order_relaxed);
  abort.at_fault.store(aborted.at_fault);
  constexpr std::chrono::steady_clock::duration kLater = kTextTime;
  abort.from.store(now() + (aborted.gone != 0 ? kLater.count() : 0), std::memory_order_relaxed);
  abort.next_step.store(step + 1, std::memory_order_release);
  for (int rank = 0; rank < region().size(); ++rank) region().ring(rank);
}

}  // namespace paceline::internode
