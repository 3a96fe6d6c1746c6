#include "shm/buckets/waits.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "shm/buckets/step_agreement.h"
#include "shm/buckets/two_level_reduction.h"
#include "shm/collectives/cross_wait.h"

namespace paceline::shm {
namespace {

constexpr std::uint64_t kWait = std::uint64_t{1} << 32;  // in RankBlock::awaited_looks

std::uint64_t looks_of(const Region& region, int rank) {
  return region.memory().rank_block(rank).awaited_looks.load(std::memory_order_relaxed);
}

// Ranks that wait in backwards, `peer` first, each for the next one and the last one for this rank;
// empty if there are none. They wait for ever if each uses the group from one thread only.
std::vector<int> row_to_this_rank(Region& region, int peer) {
  std::vector<int> before(static_cast<std::size_t>(region.size()), -1);
  std::vector<int> open{peer};
  before[static_cast<std::size_t>(peer)] = peer;
  for (std::size_t i = 0; i < open.size(); ++i) {
    const int rank = open[i];
    const RankBlock& block = region.memory().rank_block(rank);
    if (block.awaited_reducer.load(std::memory_order_relaxed) == 0) continue;
    if (!region.threads().is_one(rank)) continue;
    const LocalRankMask ranks = block.awaited_ranks.load(std::memory_order_relaxed);
    if ((ranks & local_rank_bit(region.rank())) != 0) {
      std::vector<int> row{rank};
      while (row.back() != peer) row.push_back(before[static_cast<std::size_t>(row.back())]);
      std::ranges::reverse(row);
      return row;
    }
    for (int next = 0; next < region.size(); ++next) {
      int& known = before[static_cast<std::size_t>(next)];
      if ((ranks & local_rank_bit(next)) == 0 || known >= 0) continue;
      known = rank;
      open.push_back(next);
    }
  }
  return {};
}

[[noreturn]] void fail_skipped(const ControlBlocks& blocks, std::size_t bucket, int peer) {
  std::vector<FrozenFlags> flags;  // what is frozen is not used
  for (int rank = 0; rank < blocks.size(); ++rank) {
    // One that has finished this step writes its flags of the next.
    const bool has_flags =
        blocks.has_begun(rank) && !Region::reached(blocks.progress(rank).finished, blocks.step());
    flags.emplace_back(blocks.frozen_flags(rank), has_flags ? blocks.parameters().size() : 0);
  }
  check_frozen(blocks, flags);
  blocks.fail(
      {peer},
      fmt::format(
          "in {} {} skipped {}, but {} used it: with skip_all_reduce_unused_params the same "
          "parameters must be unused on every rank",
          blocks.position(), blocks.name_of(peer), blocks.name_of_bucket(bucket),
          blocks.name_of(blocks.rank())));
}

}  // namespace

void check_used_by_all(const ControlBlocks& blocks, std::size_t bucket) {
  for (int rank = 0; rank < blocks.size(); ++rank) {
    const Word& published = blocks.words(rank, bucket).published;
    if (published.load(std::memory_order_relaxed) == blocks.step()) continue;
    fail_skipped(blocks, bucket, rank);
  }
}

const Word& BucketWait::word(int rank) const {
  return word_ == kGathered ? blocks_.progress(0).gathered : blocks_.words(rank, bucket_).*word_;
}

RankSet BucketWait::missing() const {
  if (word_ == kGathered) return {0};
  const bool only_with_lane = word_ == &ControlBlocks::BucketWords::combined;
  RankSet ranks;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    if (!reached(rank) && (!only_with_lane || two_level_->has_lane(rank, bucket_)))
      ranks.insert(rank);
  }
  return ranks;
}

bool BucketWait::is_for_other_nodes() const {
  return word_ == kGathered || word_ == &ControlBlocks::BucketWords::combined;
}

bool BucketWait::is_for_gradients() const {
  using Words = ControlBlocks::BucketWords;
  return word_ == &Words::published || word_ == &Words::skipped;
}

// Of the other words, none depends on another node once its wait has begun.
RankSet BucketWait::missing_on_other_nodes() const {
  return is_for_other_nodes() ? two_level_->missing_on_other_nodes() : RankSet();
}

bool BucketWait::may_learn_more() {
  return is_for_other_nodes() && two_level_->may_learn_more(missing());
}

std::string BucketWait::describe_on_other_nodes(const RankSet& ranks) const {
  return two_level_->describe(ranks);
}

bool BucketWait::poll() {
  return polls() && two_level_->advance();
}

std::string BucketWait::describe() const {
  return fmt::format("backward, {}, {}", blocks_.position(), blocks_.name_of_bucket(bucket_));
}

std::string BucketWait::last_seen(int rank, bool /*missing*/) const {
  const std::size_t count = blocks_.buckets().size();
  std::size_t ready = 0;
  for (std::size_t bucket = 0; bucket < count; ++bucket) {
    if (blocks_.reached(rank, bucket, &ControlBlocks::BucketWords::published)) ++ready;
  }
  if (ready == 0) return "it has no bucket of this step ready";
  const std::size_t last = blocks_.progress(rank).last.load(std::memory_order_relaxed);
  return fmt::format("it has {} of {} buckets ready, {} ({}) last", ready, count, last,
                     last < count ? blocks_.contents()[last] : "there is none");
}

void BucketWait::check(int peer) const {
  if (two_level_ != nullptr) two_level_->check_other_nodes();
  if (peer == blocks_.rank()) return;
  check_not_skipped(peer);
  const bool aborted = Region::reached(blocks_.progress(peer).aborted, blocks_.step());
  const auto at_fault = two_level_ != nullptr ? blocks_.at_fault_of(peer) : std::nullopt;
  const bool left = blocks_.region().peers().has_left(peer);
  const auto call = cross_call(blocks_.region(), peer);
  // Words that the peer published before count.
  if (reached(peer)) return;
  if (at_fault) check_at_fault(peer, *at_fault);
  if (!aborted) {
    check_not_in_other_call(peer, left, call);
    return check_not_in_other_backward(peer);
  }
  // An exception that destroys the reducer usually ends the rank, and its text then says more.
  const bool gone = blocks_.progress(peer).gone.load(std::memory_order_relaxed) != 0;
  if (gone && !left && !has_lasted_a_second(other_call_)) return;
  throw Mismatch(
      fmt::format("{} aborted {}: an exception ended its step before {} was ready",
                  blocks_.name_of(peer), blocks_.position(), blocks_.name_of_bucket(bucket_)),
      {blocks_.region().global_ranks().of(peer)}, op.operation, op.sequence);
}

// A rank that aborted a step because of others, perhaps of another node, is not at fault.
void BucketWait::check_at_fault(int peer, const RankSet& at_fault) const {
  if (at_fault == RankSet{blocks_.region().global_ranks().of(peer)}) return;
  blocks_.region().check_usable(op);
  throw Mismatch(fmt::format("{} aborted {} because of {}, before {} was ready",
                             blocks_.name_of(peer), blocks_.position(),
                             two_level_->describe(at_fault), blocks_.name_of_bucket(bucket_)),
                 at_fault.list(), op.operation, op.sequence);
}

// A rank that has skipped it may be one step ahead, and have skipped it again.
void BucketWait::check_not_skipped(int peer) const {
  if (word_ == &ControlBlocks::BucketWords::skipped) return;
  const auto& words = blocks_.words(peer, bucket_);
  const std::uint32_t skipped = words.skipped.load(std::memory_order_acquire);
  const bool again =
      skipped == blocks_.step() + 1 && !Region::reached(words.published, blocks_.step());
  if (skipped == blocks_.step() || again) fail_skipped(blocks_, bucket_, peer);
}

// Detects uneven inputs: some ranks go on training while others make the next call.
void BucketWait::check_not_in_other_call(int peer, bool left,
                                         const std::optional<CollectiveFingerprint>& call) const {
  if (left) {
    blocks_.region().fail_lost(
        peer, fmt::format("{}: {}; {}", describe(), kLeftAdvice, kUnevenAdvice), op);
  }
  if (!call) other_call_.reset();
  if (!call || !has_lasted_a_second(other_call_)) return;  // another thread's first call may come
  const std::string me = blocks_.name_of(blocks_.rank());
  blocks_.fail(
      out_of_step(),
      fmt::format("{} waits for {} in {}, call {}, while {} waits for it in "
                  "{}: {}",
                  blocks_.name_of(peer), me, shm::describe(*call, blocks_.region().global_ranks()),
                  call->sequence, me, describe(), kUnevenAdvice));
}

// Detects models whose backwards run in another order on some ranks. Within a second, another
// thread's first backward may come. A rank that does not run says nothing: so each must have looked
// again in its wait, at ranks that have been in theirs all the time.
void BucketWait::check_not_in_other_backward(int peer) const {
  if (!is_of_this_thread()) return;
  show();
  Region& region = blocks_.region();
  const auto reducer =
      region.memory().rank_block(peer).awaited_reducer.load(std::memory_order_relaxed);
  Looks looks;
  if (reducer != 0 && reducer != blocks_.number() && region.threads().is_one(region.rank())) {
    for (const int rank : row_to_this_rank(region, peer)) {
      looks.emplace_back(rank, looks_of(region, rank));
    }
  }
  const bool goes_on = std::ranges::equal(looks, looks_, [](const auto& now, const auto& then) {
    return now.first == then.first && now.second / kWait == then.second / kWait;
  });
  if (!goes_on) {
    other_backward_.reset();
    looks_ = looks;
  }
  if (looks.empty() || !has_lasted_a_second(other_backward_)) return;
  for (std::size_t i = 0; i < looks.size(); ++i) {
    if (looks[i].second - looks_[i].second < 2) return;
  }
  blocks_.fail(out_of_step(),
               fmt::format("{} waits in the backward of another model, and {} in {}, each for the "
                           "other: run the backwards of several models in the same order on all "
                           "ranks",
                           blocks_.name_of(peer), blocks_.name_of(blocks_.rank()), describe()));
}

// Whether what it waits for is the work of threads that wait themselves. On several nodes, another
// thread reduces.
bool BucketWait::is_of_this_thread() const {
  return two_level_ == nullptr || word_ == &ControlBlocks::BucketWords::published;
}

// For check_not_in_other_backward of other ranks.
void BucketWait::show() const {
  LocalRankMask ranks = 0;
  for (const int rank : missing()) ranks |= local_rank_bit(rank);
  RankBlock& own = blocks_.region().memory().rank_block(blocks_.rank());
  const auto looks = own.awaited_looks.load(std::memory_order_relaxed);
  own.awaited_ranks.store(ranks, std::memory_order_relaxed);
  own.awaited_reducer.store(blocks_.number(), std::memory_order_relaxed);
  own.awaited_looks.store(std::exchange(is_shown_, true) ? looks + 1 : (looks / kWait + 1) * kWait,
                          std::memory_order_release);
}

BucketWait::~BucketWait() {
  if (!is_shown_) return;
  RankBlock& own = blocks_.region().memory().rank_block(blocks_.rank());
  own.awaited_reducer.store(0, std::memory_order_relaxed);
}

RankSet BucketWait::out_of_step() const {
  std::vector<std::string> where;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    where.emplace_back(blocks_.has_begun(rank) ? "here" : "elsewhere");
  }
  return blocks_.ranks_in_minority(where);
}

bool BucketWait::has_lasted_a_second(std::optional<base::Deadline>& clock) {
  if (!clock) clock = base::Deadline::after(std::chrono::seconds(1));
  return clock->expired();
}

RankSet AbortWait::missing() const {
  RankSet ranks;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    if (!Region::reached(blocks_.progress(rank).aborted, blocks_.step())) ranks.insert(rank);
  }
  return ranks;
}

std::string AbortWait::describe() const {
  return "aborting " + blocks_.position() + ", whose backward did not complete";
}

void AbortWait::check(int peer) const {
  if (!Region::reached(blocks_.progress(peer).finished, blocks_.step())) return;
  const int mine = blocks_.rank();
  blocks_.region().fail(
      {FailureKind::mismatch,
       {blocks_.region().global_ranks().of(mine)},
       fmt::format("an exception ended the backward of {} in {} after all gradients were "
                   "reduced: {} finished the step, so the models may differ from here on",
                   blocks_.name_of(mine), blocks_.position(), blocks_.name_of(peer))},
      op);
}

}  // namespace paceline::shm
