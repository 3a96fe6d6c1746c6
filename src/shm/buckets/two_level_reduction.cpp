#include "shm/buckets/two_level_reduction.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include <paceline/error.h>

#include "shm/kernels/kernels.h"
#include "shm/sync/wait_ladder.h"

namespace paceline::shm {
namespace {

// How much longer waits for other nodes last than waits for ranks of this node.
constexpr std::chrono::seconds kReportTime{1};
// A rank that has not checked its peers for so long does not run. Shorter, so that a wait which
// ends with a report knows it.
constexpr std::chrono::milliseconds kHangTime{900};

std::size_t sum_size(DataType type) {
  return element_size(accumulation_type(type));
}

// Has the same result on all nodes, since it depends on nothing else.
Slice divide(const Bucket& bucket, int lane, int lanes) {
  if (lane >= lanes) return {0, 0};
  return slice_of(bucket.count, element_size(bucket.type), lane, lanes);
}

std::shared_ptr<std::byte> allocate_lane(const std::shared_ptr<Region>& region,
                                         const Bucket& bucket, const SecondLevel& between) {
  const std::size_t count = divide(bucket, region->rank(), between.lanes()).count();
  if (count == 0) return nullptr;
  void* const memory =
      region->allocate_or_throw(between.parts().size() * count * sum_size(bucket.type));
  return {static_cast<std::byte*>(memory),
          [region](std::byte* pointer) { region->memory().free(pointer); }};
}

// The sum of no values: a zero that changes no other, not even -0. Of a weighted bucket, whose sums
// are of these types.
void fill_with_nothing(DataType type, std::byte* sums, std::size_t count) {
  if (accumulation_type(type) == DataType::float64) {
    std::fill_n(reinterpret_cast<double*>(sums), count, -0.0);
  } else {
    std::fill_n(reinterpret_cast<float*>(sums), count, -0.0F);
  }
}

}  // namespace

TwoLevelReduction::LaneBuffers TwoLevelReduction::allocate(const std::shared_ptr<Region>& region,
                                                           std::span<const Bucket> buckets,
                                                           const SecondLevel& between) {
  if (between.lanes() < 1 || between.lanes() > region->size() ||
      between.here().size() != static_cast<std::size_t>(region->size())) {
    throw Error(fmt::format("a second level of {} lanes for {} ranks of this node, which has {}",
                            between.lanes(), between.here().size(), region->size()));
  }
  LaneBuffers buffers;
  for (const Bucket& bucket : buckets) {
    buffers.push_back(allocate_lane(region, bucket, between));
  }
  return buffers;
}

TwoLevelReduction::TwoLevelReduction(const ControlBlocks& blocks, StepAgreement& agreement,
                                     std::shared_ptr<SecondLevel> between, LaneBuffers buffers)
    : blocks_(blocks),
      agreement_(agreement),
      between_(std::move(between)),
      job_(blocks, agreement, *between_),
      states_(blocks.buckets().size()) {
  for (std::size_t b = 0; b < states_.size(); ++b) {
    if (buffers[b]) set_buffer(b, std::move(buffers[b]));
  }
}

Slice TwoLevelReduction::lane_of(std::size_t bucket, int lane) const {
  return divide(blocks_.buckets()[bucket], lane, between_->lanes());
}

void TwoLevelReduction::set_buffer(std::size_t bucket, std::shared_ptr<std::byte> buffer) {
  const auto offset = blocks_.region().memory().shared_offset(buffer.get(), 0);
  blocks_.own_words(bucket).lane_offset.store(*offset, std::memory_order_relaxed);
  states_[bucket].buffer = std::move(buffer);
}

void TwoLevelReduction::begin_step() {
  job_.begin_step();
  open_.clear();
  published_.clear();
  aborted_ = false;
  for (std::size_t b = 0; b < states_.size(); ++b) {
    State& state = states_[b];
    state.accumulated = state.combined = state.completed = false;
    // No rank of the node is in the old step any more, so only the exchange still has the old one.
    if (state.cancelled) {
      set_buffer(b, allocate_lane(blocks_.shared_region(), blocks_.buckets()[b], *between_));
    }
    state.cancelled = false;
  }
}

void TwoLevelReduction::publish(std::size_t bucket) {
  const std::lock_guard lock(published_mutex_);
  published_.push_back(bucket);
}

void TwoLevelReduction::ring_if_last(std::size_t bucket,
                                     Word ControlBlocks::BucketWords::*word) const {
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    // Sequentially consistent, as publish is: of ranks that publish at the same time, one sees all.
    const auto seen = (blocks_.words(rank, bucket).*word).load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(seen - blocks_.step()) < 0) return;
  }
  blocks_.region().ring_peers();
  blocks_.region().ring(blocks_.rank());
}

bool TwoLevelReduction::advance() {
  if (aborted_) return false;
  {
    const std::lock_guard lock(published_mutex_);
    open_.insert(open_.end(), published_.begin(), published_.end());
    published_.clear();
  }
  std::erase_if(open_, [&](std::size_t bucket) { return advance(bucket); });
  const auto is_busy = [](const SecondLevel::Stage* stage) {
    return stage != nullptr && !stage->rings();
  };
  return is_busy(job_.stage()) ||
         std::ranges::any_of(open_, [&](std::size_t b) { return is_busy(states_[b].stage.get()); });
}

// Returns true once this rank has nothing left to do for the bucket.
bool TwoLevelReduction::advance(std::size_t bucket) {
  State& state = states_[bucket];
  if (!state.accumulated) {
    using Words = ControlBlocks::BucketWords;
    if (!blocks_.reached_by_all(bucket, &Words::published) || !job_.advance()) return false;
    accumulate(bucket);
  }
  if (!state.combined) combine(bucket);
  if (!state.completed) complete(bucket);
  return state.combined && state.completed;
}

// Calls visitor(owner, overlap, sums, lane) for each lane that overlaps this rank's slice. `owner`
// is the lane's rank, and `sums` where the first sums of the overlap are stored; those of the next
// part of the node are a lane further.
template <typename Visitor>
void TwoLevelReduction::visit_lanes(std::size_t bucket, Visitor visitor) {
  const auto& [count, type, op] = blocks_.buckets()[bucket];
  const Slice slice = slice_of(count, element_size(type), blocks_.rank(), blocks_.size());
  for (int owner = 0; owner < between_->lanes(); ++owner) {
    const Slice lane = lane_of(bucket, owner);
    const Slice overlap{std::max(slice.begin, lane.begin), std::min(slice.end, lane.end)};
    if (overlap.begin >= overlap.end) continue;
    const auto offset = blocks_.words(owner, bucket).lane_offset.load(std::memory_order_relaxed);
    std::byte* const buffer = blocks_.region().memory().resolve(
        owner, offset, between_->parts().size() * lane.count() * sum_size(type));
    if (buffer == nullptr || offset % kCacheLine != 0) {
      blocks_.fail({owner}, fmt::format("{} published memory that is not its own for sums of {}",
                                        blocks_.name_of(owner), blocks_.name_of_bucket(bucket)));
    }
    visitor(owner, overlap, buffer + (overlap.begin - lane.begin) * sum_size(type), lane);
  }
}

void TwoLevelReduction::accumulate(std::size_t bucket) {
  check_used_by_all(blocks_, bucket);
  const std::size_t size = sum_size(blocks_.buckets()[bucket].type);
  visit_lanes(bucket, [&](int, const Slice& overlap, std::byte* sums, const Slice& lane) {
    for (const std::vector<int>& part : between_->parts()) {
      accumulate(bucket, part, overlap, sums);
      sums += lane.count() * size;
    }
  });
  states_[bucket].accumulated = true;
  blocks_.region().publish(blocks_.own_words(bucket).accumulated, blocks_.step());
  ring_if_last(bucket, &ControlBlocks::BucketWords::accumulated);
}

// The values of some ranks of this node.
void TwoLevelReduction::accumulate(std::size_t bucket, std::span<const int> ranks,
                                   const Slice& slice, std::byte* sums) {
  const auto& [count, type, op] = blocks_.buckets()[bucket];
  const bool weighted = op == ReduceOp::avg && !agreement_.weights().empty();
  std::array<const void*, kMaxRanks> sources;
  std::array<double, kMaxRanks> weights;
  std::array<int, kMaxRanks> leaves;
  std::size_t used = 0;
  for (const int rank : ranks) {
    const auto at = static_cast<std::size_t>(rank);
    if (weighted && agreement_.weights()[at] == 0) continue;
    if (weighted) weights[used] = agreement_.weights()[at];
    leaves[used] = between_->here()[at];
    sources[used++] = static_cast<const std::byte*>(blocks_.find(rank, bucket)) +
                      slice.begin * element_size(type);
  }
  // All of them may have weight 0.
  if (used == 0) return fill_with_nothing(type, sums, slice.count());
  const Terms terms{std::span(sources).first(used), std::span(weights).first(weighted ? used : 0),
                    std::span(leaves).first(used)};
  shm::accumulate(type, op, terms, sums, slice.count());
}

void TwoLevelReduction::combine(std::size_t bucket) {
  State& state = states_[bucket];
  const int lane = blocks_.rank();
  if (has_lane(lane, bucket)) {
    if (!state.stage) {
      using Words = ControlBlocks::BucketWords;
      if (!blocks_.reached_by_all(bucket, &Words::accumulated)) return;
      const auto& [count, type, op] = blocks_.buckets()[bucket];
      try {
        state.stage = between_->start(
            {blocks_.step(), bucket, lane, accumulation_type(type),
             op == ReduceOp::avg ? ReduceOp::sum : op, lane_of(bucket, lane).count()},
            state.buffer);
      } catch (...) {
        state.cancelled = true;
        fail_between_nodes(blocks_, {}, bucket);
      }
    }
    if (!is_complete(blocks_, *state.stage, bucket, job_.global_ranks())) return;
    state.stage.reset();
    blocks_.region().publish(blocks_.own_words(bucket).combined, blocks_.step());
    blocks_.region().ring_peers();
  }
  state.combined = true;
}

void TwoLevelReduction::complete(std::size_t bucket) {
  using Words = ControlBlocks::BucketWords;
  bool combined = true;
  visit_lanes(bucket, [&](int owner, const Slice&, const std::byte*, const Slice&) {
    combined = combined && blocks_.reached(owner, bucket, &Words::combined);
  });
  if (!combined) return;
  const Bucket& values = blocks_.buckets()[bucket];
  const auto ranks = static_cast<std::size_t>(blocks_.size());
  visit_lanes(bucket, [&](int, const Slice& part, const std::byte* sums, const Slice&) {
    std::array<void*, kMaxRanks> destinations;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      destinations[rank] = static_cast<std::byte*>(blocks_.find(static_cast<int>(rank), bucket)) +
                           part.begin * element_size(values.type);
    }
    const std::array<const void*, 1> partial{sums};
    shm::complete(values.type, values.op, {.sources = partial}, agreement_.divisor(),
                  std::span(destinations).first(ranks), part.count());
  });
  states_[bucket].completed = true;
  blocks_.region().publish(blocks_.own_words(bucket).reduced, blocks_.step());
  ring_if_last(bucket, &Words::reduced);
}

void TwoLevelReduction::cancel(bool gone) noexcept {
  const Region& region = blocks_.region();
  try {
    cancel(
        region.failed() ? region.failure().ranks : RankSet{region.global_ranks().of(region.rank())},
        gone);
  } catch (const std::exception&) {
    cancel(RankSet(), gone);  // no memory for the failure's text
  }
}

void TwoLevelReduction::cancel(const RankSet& at_fault, bool gone) noexcept {
  if (aborted_) return;
  aborted_ = true;
  blocks_.publish_at_fault(at_fault);
  between_->abort(blocks_.step(), at_fault, gone);
  job_.cancel();
  for (State& state : states_) {
    if (!state.stage) continue;
    state.stage->cancel();
    state.stage.reset();
    state.cancelled = true;
  }
}

void TwoLevelReduction::retire() {
  for (const State& state : states_) {
    if (state.buffer) blocks_.region().memory().retire(state.buffer.get());
  }
}

void TwoLevelReduction::check_other_nodes() {
  note_checks();
  job_.check();
  RankSet ranks;
  if (job_.stage() != nullptr) ranks |= job_.stage()->awaited();
  for (const State& state : states_) {
    if (state.stage) ranks |= state.stage->awaited();
  }
  if (blocks_.rank() == 0) blocks_.publish_silent(between_->silent_leaders());
  blocks_.publish_missing(ranks);
}

void TwoLevelReduction::restart_deadline() {
  checks_.clear();
  learning_.reset();
}

void TwoLevelReduction::note_checks() {
  const auto now = base::Deadline::Clock::now();
  // This rank did not run either, as after SIGSTOP of all.
  if (now - noted_checks_ >= kHangTime) checks_.clear();
  noted_checks_ = now;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const auto count = blocks_.checks(rank).load(std::memory_order_acquire);
    if (at == checks_.size()) checks_.push_back({count, now});
    if (checks_[at].count != count) checks_[at] = {count, now};
  }
}

// A rank that hangs does not check.
bool TwoLevelReduction::hangs(int rank) const {
  if (!blocks_.region().peers().describe_stop(rank).empty()) return true;
  return !checks_.empty() &&
         base::Deadline::Clock::now() - checks_[static_cast<std::size_t>(rank)].since >= kHangTime;
}

bool TwoLevelReduction::may_learn_more(const RankSet& missing) {
  for (const int rank : missing) {
    if (hangs(rank)) return false;
  }
  if (!learning_) learning_ = base::Deadline::after(kReportTime);
  return !learning_->expired();
}

RankSet TwoLevelReduction::missing_on_other_nodes() const {
  RankSet ranks;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    // What one that hangs waited for stays as it was.
    if (!hangs(rank)) ranks |= blocks_.missing_of(rank);
  }
  ranks -= blocks_.region().global_ranks().of(RankSet::all(blocks_.size()));
  for (const int leader : blocks_.silent_leaders()) {
    // The other ranks of its node wait for it.
    const RankSet others = ranks - node_of(leader);
    if (others != ranks) ranks = others | RankSet{leader};
  }
  return ranks;
}

RankSet TwoLevelReduction::node_of(int global_rank) const {
  const std::vector<int>& ranks = between_->ranks();
  const std::vector<int>& nodes = between_->nodes();
  RankSet found;
  const auto at = static_cast<std::size_t>(std::ranges::find(ranks, global_rank) - ranks.begin());
  for (std::size_t i = 0; at < ranks.size() && i < ranks.size(); ++i) {
    if (nodes[i] == nodes[at]) found.insert(ranks[i]);
  }
  return found;
}

std::string TwoLevelReduction::describe(const RankSet& ranks) const {
  return describe_at_fault(ranks, job_.global_ranks());
}

}  // namespace paceline::shm
