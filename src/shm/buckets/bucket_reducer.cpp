#include "shm/buckets/bucket_reducer.h"

#include <algorithm>
#include <array>

#include <paceline/error.h>

#include "shm/buckets/waits.h"
#include "shm/kernels/kernels.h"

namespace paceline::shm {

namespace {

// Call before the exchange of control blocks: a rank may fail afterwards, which ends allocation
// here.
std::vector<std::shared_ptr<std::byte>> allocate(const std::shared_ptr<Region>& region,
                                                 std::span<const Bucket> buckets) {
  std::vector<std::shared_ptr<std::byte>> data;
  for (const Bucket& bucket : buckets) {
    void* const memory = region->allocate_or_throw(bucket.bytes());
    data.emplace_back(static_cast<std::byte*>(memory),
                      [region](std::byte* pointer) { region->memory().free(pointer); });
  }
  return data;
}

}  // namespace

BucketReducer::BucketReducer(Group& group, std::span<const Bucket> buckets, Describe describe,
                             std::uint32_t steps, std::vector<std::string> parameters,
                             std::shared_ptr<SecondLevel> between_nodes)
    : region_(group.region()),
      data_(allocate(region_, buckets)),
      lanes_(between_nodes ? TwoLevelReduction::allocate(region_, buckets, *between_nodes)
                           : TwoLevelReduction::LaneBuffers()),
      blocks_(group, buckets, std::move(describe), steps, std::move(parameters),
              between_nodes ? between_nodes->ranks().size() : 0),
      agreement_(blocks_),
      places_(buckets.size()),
      deadline_{group.timeout()} {
  for (std::size_t b = 0; b < buckets.size(); ++b) place(b, data_[b].get());
  if (between_nodes) {
    two_level_ = std::make_unique<TwoLevelReduction>(blocks_, agreement_, std::move(between_nodes),
                                                     std::move(lanes_));
  }
}

BucketReducer::~BucketReducer() {
  if (region_->in_forked_child() || !in_step_) return;
  if (two_level_) {
    two_level_->cancel();
    two_level_->retire();
  }
  blocks_.own_progress().gone.store(1, std::memory_order_relaxed);
  region_->publish(blocks_.own_progress().aborted, blocks_.step());
  for (const auto& memory : data_) region_->memory().retire(memory.get());
  for (void* const memory : places_) region_->memory().retire(memory);
}

void BucketReducer::place(std::size_t bucket, void* memory) {
  places_[bucket] = memory;
  blocks_.place(bucket, memory);
}

void BucketReducer::begin_step(const StepSummary& summary, double weight, FrozenFlags frozen) {
  region_->check_usable({"backward", blocks_.step() + 1});
  if (two_level_) two_level_->begin_step();
  in_step_ = true;
  agreement_.begin_step();
  pending_.clear();
  region_->threads().note_this_thread();
  skipped_.assign(data_.size(), false);
  for (std::size_t b = 0; b < data_.size(); ++b) {
    if (places_[b] != data_[b].get()) place(b, data_[b].get());
  }
  blocks_.begin_step(summary, weight, frozen);
}

bool BucketReducer::use_in_place(std::size_t bucket, void* memory) {
  if (!region_->memory().holds(memory, blocks_.buckets()[bucket].bytes())) return false;
  place(bucket, memory);
  return true;
}

void BucketReducer::publish(std::size_t bucket) {
  two_level_ ? two_level_->publish(bucket) : pending_.push_back(bucket);
  blocks_.own_progress().last.store(static_cast<std::uint32_t>(bucket), std::memory_order_relaxed);
  region_->publish(blocks_.own_words(bucket).published, blocks_.step());
  if (two_level_) two_level_->ring_if_last(bucket, &BucketWords::published);
}

void BucketReducer::skip(std::size_t bucket) {
  skipped_[bucket] = true;
  auto& own = blocks_.own_words(bucket);
  // Kept near the step, as a bucket may be skipped for long.
  own.published.store(blocks_.step() - 1, std::memory_order_relaxed);
  own.reduced.store(blocks_.step() - 1, std::memory_order_relaxed);
  if (two_level_) two_level_->skip(bucket);
  region_->publish(own.skipped, blocks_.step());
}

template <typename Action>
void BucketReducer::run_or_cancel(Action action) {
  try {
    action();
  } catch (const PeerError& error) {
    two_level_->cancel(RankSet(error.ranks()));
    throw;
  } catch (...) {
    two_level_->cancel();
    throw;
  }
}

void BucketReducer::try_progress() {
  if (two_level_) return run_or_cancel([&] { two_level_->advance(); });
  std::erase_if(pending_, [&](std::size_t bucket) {
    if (!blocks_.reached_by_all(bucket, &BucketWords::published)) return false;
    reduce_slice(bucket);
    return true;
  });
}

void BucketReducer::reduce_slice(std::size_t bucket) {
  agreement_.compare_once();
  const auto& [count, type, op] = blocks_.buckets()[bucket];
  const int size = blocks_.size();
  const Slice slice = slice_of(count, element_size(type), blocks_.rank(), size);
  std::array<void*, kMaxRanks> parts;
  for (int rank = 0; rank < size; ++rank) {
    parts[static_cast<std::size_t>(rank)] =
        static_cast<std::byte*>(blocks_.find(rank, bucket)) + slice.begin * element_size(type);
  }
  // A single rank already has the average, bit for bit.
  if (size > 1) {
    reduce_parts(blocks_.buckets()[bucket], std::span(parts).first(static_cast<std::size_t>(size)),
                 slice.count());
  }
  region_->publish(blocks_.own_words(bucket).reduced, blocks_.step());
}

// The parts are sources and destinations alike.
void BucketReducer::reduce_parts(const Bucket& bucket, std::span<void* const> parts,
                                 std::size_t count) const {
  const std::span sources(const_cast<const void* const*>(parts.data()), parts.size());
  const std::vector<double>& by_rank = agreement_.weights();
  if (bucket.op != ReduceOp::avg || by_rank.empty()) {
    return reduce(bucket.type, bucket.op, sources, parts, count);
  }
  std::array<const void*, kMaxRanks> counted;
  std::array<double, kMaxRanks> weights;
  std::size_t used = 0;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (by_rank[rank] == 0) continue;
    counted[used] = sources[rank];
    weights[used++] = by_rank[rank];
  }
  reduce_weighted(bucket.type, std::span(counted).first(used), std::span(weights).first(used),
                  parts, count);
}

void BucketReducer::finish() {
  restart_deadline();
  waits_.clear();
  if (two_level_) return run_or_cancel([&] { finish_two_levels(); });
  for (const std::size_t bucket : pending_) {
    await_all(bucket, &BucketWords::published);
    reduce_slice(bucket);
  }
  pending_.clear();
  // Only now will every rank reach finish, where it may wait first.
  restart_deadline();
  finish_step();
}

// Waits in turn for each word that advance() needs, so that advance() has nothing left to do in the
// end. While this polls, advance() does what is ready.
void BucketReducer::finish_two_levels() {
  await_all(&BucketWords::published);
  two_level_->advance();
  for (std::size_t bucket = 0; bucket < data_.size(); ++bucket) {
    if (skipped_[bucket]) continue;
    BucketWait gathered(blocks_, deadline_, bucket, BucketWait::kGathered, two_level_.get());
    await(gathered, 0);
  }
  two_level_->advance();
  restart_deadline();
  await_all(&BucketWords::accumulated);
  two_level_->advance();
  for (std::size_t bucket = 0; bucket < data_.size(); ++bucket) {
    if (skipped_[bucket]) continue;
    BucketWait combined(blocks_, deadline_, bucket, &BucketWords::combined, two_level_.get());
    for (int rank = 0; rank < blocks_.size(); ++rank) {
      if (two_level_->has_lane(rank, bucket)) await(combined, rank);
    }
  }
  two_level_->advance();
  restart_deadline();  // the last of the lanes may have come after it
  finish_step();
}

void BucketReducer::finish_step() {
  await_all(&BucketWords::reduced);
  blocks_.own_progress().finished.store(blocks_.step(), std::memory_order_release);
  in_step_ = false;
}

void BucketReducer::restart_deadline() {
  deadline_.deadline.reset();
  if (two_level_) two_level_->restart_deadline();
}

void BucketReducer::await_all(Word BucketWords::*word) {
  for (std::size_t bucket = 0; bucket < data_.size(); ++bucket) {
    if (!skipped_[bucket]) await_all(bucket, word);
  }
}

void BucketReducer::await_all(std::size_t bucket, Word BucketWords::*word) {
  BucketWait context(blocks_, deadline_, bucket, word, two_level_.get());
  for (int rank = 0; rank < blocks_.size(); ++rank) await(context, rank);
}

void BucketReducer::await(BucketWait& context, int rank) {
  using Clock = std::chrono::steady_clock;
  if (context.reached(rank)) return;
  const auto begin = Clock::now();
  region_->await(context.word(rank), blocks_.step(), rank, context);
  const int charged = context.is_for_other_nodes() ? -1 : region_->global_ranks().of(rank);
  waits_.push_back({static_cast<int>(context.bucket()), charged, begin, Clock::now()});
}

bool BucketReducer::abort_step() {
  if (!in_step_) return false;
  if (two_level_) two_level_->cancel();
  region_->check_usable({"forward", blocks_.step()});
  region_->publish(blocks_.own_progress().aborted, blocks_.step());
  deadline_.deadline.reset();
  AbortWait context(blocks_, deadline_);
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    region_->await(blocks_.progress(rank).aborted, blocks_.step(), rank, context);
    context.check(rank);
  }
  in_step_ = false;
  return true;
}

void BucketReducer::fail(const std::string& text, FailureKind kind) {
  blocks_.fail({kind, {region_->global_ranks().of(region_->rank())}, text});
}

}  // namespace paceline::shm
