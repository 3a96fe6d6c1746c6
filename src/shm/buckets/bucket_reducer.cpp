#include "shm/buckets/bucket_reducer.h"

#include <algorithm>
#include <array>
#include <tuple>

#include <paceline/error.h>

#include "shm/buckets/waits.h"
#include "shm/kernels/kernels.h"

namespace paceline::shm {

namespace {

using Memory = std::shared_ptr<std::byte>;

Memory allocate(const std::shared_ptr<Region>& region, std::size_t bytes,
                std::size_t alignment = Arena::kAlignment) {
  void* const memory = region->allocate_or_throw(bytes, alignment);
  return {static_cast<std::byte*>(memory),
          [region](std::byte* pointer) { region->memory().free(pointer); }};
}

std::vector<Memory> allocate_buckets(const std::shared_ptr<Region>& region,
                                     std::span<const Bucket> buckets, bool own_pages) {
  const std::size_t alignment = own_pages ? kPage : Arena::kAlignment;
  std::vector<Memory> data;
  for (const Bucket& bucket : buckets) {
    data.push_back(allocate(region, bucket.bytes(), alignment));
  }
  return data;
}

bool has_parts(const LeafPlan& leaves, const Bucket& bucket) {
  return !leaves.one_each() && bucket.op == ReduceOp::avg;
}

// Whether the last part of a bucket with parts is the bucket itself.
bool last_part_is_bucket(const LeafPlan& leaves, const Bucket& bucket) {
  return leaves.part_type(bucket.type) == bucket.type;
}

std::vector<std::vector<Memory>> allocate_parts(const std::shared_ptr<Region>& region,
                                                std::span<const Bucket> buckets,
                                                const LeafPlan& leaves, bool own_pages) {
  const std::size_t alignment = own_pages ? kPage : Arena::kAlignment;
  std::vector<std::vector<Memory>> parts(buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    if (!has_parts(leaves, buckets[b])) continue;
    std::size_t number = leaves.parts(region->rank()).size();
    if (last_part_is_bucket(leaves, buckets[b])) --number;
    const std::size_t size = element_size(leaves.part_type(buckets[b].type));
    while (parts[b].size() < number) {
      parts[b].push_back(allocate(region, buckets[b].count * size, alignment));
    }
  }
  return parts;
}

LeafPlan checked_leaves(const Group& group, const BucketReducer::Options& options) {
  const int ranks = group.region()->size();
  LeafPlan leaves = options.leaves.value_or(LeafPlan(ranks));
  if (options.between_nodes && !leaves.one_each()) {
    throw UsageError("logical ranks on several nodes are not supported yet");
  }
  return leaves;
}

}  // namespace

// Memory and the thread come before the exchange of control blocks: a rank may fail afterwards,
// which ends allocation here, and one that fails before lets nobody wait for its first step.
BucketReducer::BucketReducer(Group& group, std::span<const Bucket> buckets,
                             const Describe& describe, Options options)
    : region_(group.region()),
      leaves_(checked_leaves(group, options)),
      data_(allocate_buckets(region_, buckets, options.own_pages)),
      parts_(allocate_parts(region_, buckets, leaves_, options.own_pages)),
      lanes_(options.between_nodes
                 ? TwoLevelReduction::allocate(region_, buckets, *options.between_nodes)
                 : TwoLevelReduction::LaneBuffers()),
      progress_(options.between_nodes ? make_progress() : nullptr),
      blocks_(group, buckets, leaves_, describe, options.steps, std::move(options.parameters),
              options.between_nodes ? options.between_nodes->ranks().size() : 0),
      agreement_(blocks_, options.sums),
      places_(buckets.size()),
      ones_(static_cast<std::size_t>(leaves_.range(region_->rank()).count), 1.0),
      notes_thread_(options.notes_thread),
      deadline_{group.timeout()} {
  for (std::size_t b = 0; b < buckets.size(); ++b) reset_places(b);
  if (options.between_nodes) {
    two_level_ = std::make_unique<TwoLevelReduction>(
        blocks_, agreement_, std::move(options.between_nodes), std::move(lanes_));
  }
}

std::unique_ptr<StepProgress> BucketReducer::make_progress() {
  return std::make_unique<StepProgress>(region_, [this] {
    bool again = false;
    run_or_cancel([&] { again = two_level_->advance(); });
    return again;
  });
}

BucketReducer::~BucketReducer() {
  if (region_->in_forked_child()) {
    std::ignore = progress_.release();
    std::ignore = two_level_.release();
    return;
  }
  if (!in_step_) return;
  if (two_level_) {
    progress_->end();
    two_level_->cancel(true);
    two_level_->retire();
  }
  blocks_.own_progress().gone.store(1, std::memory_order_relaxed);
  region_->publish(blocks_.own_progress().aborted, blocks_.step());
  for (const auto& memory : data_) region_->memory().retire(memory.get());
  for (void* const memory : places_) region_->memory().retire(memory);
  for (const auto& parts : parts_) {
    for (const auto& memory : parts) region_->memory().retire(memory.get());
  }
  for (void* const memory : used_parts_) region_->memory().retire(memory);
}

// Only the parent has the step's threads, and its words in shared memory are not the child's.
void BucketReducer::check_process() const {
  if (region_->in_forked_child()) region_->check_usable({"backward", blocks_.step()});
}

void BucketReducer::place(std::size_t bucket, void* memory) {
  places_[bucket] = memory;
  blocks_.place(bucket, memory);
}

void BucketReducer::reset_places(std::size_t bucket) {
  if (places_[bucket] != data_[bucket].get()) place(bucket, data_[bucket].get());
  if (!has_parts(leaves_, blocks_.buckets()[bucket])) return;
  const std::size_t parts = leaves_.parts(region_->rank()).size();
  for (std::size_t p = 0; p < parts; ++p) blocks_.place_part(bucket, p, own_part(bucket, p));
}

void* BucketReducer::own_part(std::size_t bucket, std::size_t part) const {
  const auto& own = parts_[bucket];
  return part < own.size() ? own[part].get() : data_[bucket].get();
}

void BucketReducer::begin_step(const StepSummary& summary, std::span<const double> weights,
                               FrozenFlags frozen) {
  region_->check_usable({"backward", blocks_.step() + 1});
  if (two_level_) two_level_->begin_step();
  in_step_ = true;
  agreement_.begin_step();
  pending_.clear();
  if (notes_thread_) note_this_thread();
  skipped_.assign(data_.size(), false);
  used_parts_.clear();
  for (std::size_t b = 0; b < data_.size(); ++b) reset_places(b);
  blocks_.begin_step(summary, weights.empty() ? ones_ : weights, frozen);
  if (progress_) progress_->begin();
}

bool BucketReducer::use_in_place(std::size_t bucket, void* memory, std::size_t part) {
  check_process();
  const auto& [count, type, op] = blocks_.buckets()[bucket];
  const std::size_t bytes = count * element_size(leaves_.part_type(type));
  if (!region_->memory().holds(memory, bytes)) return false;
  if (has_parts(leaves_, blocks_.buckets()[bucket])) {
    blocks_.place_part(bucket, part, memory);
    used_parts_.push_back(memory);
  }
  if (part == parts_[bucket].size()) place(bucket, memory);
  return true;
}

void BucketReducer::publish(std::size_t bucket) {
  check_process();
  two_level_ ? two_level_->publish(bucket) : pending_.push_back(bucket);
  blocks_.outdate(bucket, &BucketWords::skipped);
  blocks_.own_progress().last.store(static_cast<std::uint32_t>(bucket), std::memory_order_relaxed);
  region_->publish(blocks_.own_words(bucket).published, blocks_.step());
  if (two_level_) two_level_->ring_if_last(bucket, &BucketWords::published);
}

void BucketReducer::skip(std::size_t bucket) {
  check_process();
  skipped_[bucket] = true;
  blocks_.outdate(bucket, &BucketWords::published);
  blocks_.outdate(bucket, &BucketWords::reduced);
  if (two_level_) {
    blocks_.outdate(bucket, &BucketWords::accumulated);
    blocks_.outdate(bucket, &BucketWords::combined);
  }
  region_->publish(blocks_.own_words(bucket).skipped, blocks_.step());
  if (two_level_) two_level_->ring_if_last(bucket, &BucketWords::skipped);
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
  check_process();
  if (two_level_) return progress_->rethrow();
  std::erase_if(pending_, [&](std::size_t bucket) {
    if (!blocks_.reached_by_all(bucket, &BucketWords::published)) return false;
    reduce_slice(bucket);
    return true;
  });
}

void BucketReducer::reduce_slice(std::size_t bucket) {
  check_used_by_all(blocks_, bucket);
  agreement_.compare_once();
  const auto& [count, type, op] = blocks_.buckets()[bucket];
  const int size = blocks_.size();
  const Slice slice = slice_of(count, element_size(type), blocks_.rank(), size);
  const auto ranks = static_cast<std::size_t>(blocks_.size());
  std::array<void*, kMaxRanks> buckets;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    buckets[rank] = static_cast<std::byte*>(blocks_.find(static_cast<int>(rank), bucket)) +
                    slice.begin * element_size(type);
  }
  const std::span to = std::span(buckets).first(ranks);
  if (op == ReduceOp::avg) {
    average_slice(bucket, slice, to);
  } else if (ranks > 1) {
    const std::span sources(const_cast<const void* const*>(to.data()), to.size());
    reduce(type, op, sources, to, slice.count());
  }
  region_->publish(blocks_.own_words(bucket).reduced, blocks_.step());
}

// `to`: every rank's slice of the bucket.
void BucketReducer::average_slice(std::size_t bucket, const Slice& slice,
                                  std::span<void* const> to) const {
  // A single leaf is the average, bit for bit.
  if (leaves_.leaves() == 1) return;
  const DataType type = blocks_.buckets()[bucket].type;
  std::array<const void*, kMaxSources> sources;
  std::size_t number = 0;
  if (leaves_.one_each()) {
    for (const auto& source : leaves_.sources()) {
      sources[number++] = to[static_cast<std::size_t>(source.rank)];
    }
  } else {
    const std::size_t begin = slice.begin * element_size(leaves_.part_type(type));
    for (const auto& [rank, part] : leaves_.sources()) {
      sources[number++] =
          static_cast<const std::byte*>(blocks_.find_part(rank, bucket, part)) + begin;
    }
  }
  leaves_.average(type, std::span(sources).first(number), agreement_.weights(),
                  agreement_.divisor(), to, slice.count());
}

void BucketReducer::finish() {
  check_process();
  restart_deadline();
  waits_.clear();
  if (two_level_) {
    progress_->end();
    progress_->rethrow();
    return run_or_cancel([&] { finish_two_levels(); });
  }
  for (const std::size_t bucket : pending_) {
    BucketWait context(blocks_, deadline_, bucket, &BucketWords::published, nullptr);
    await_all(context);
    reduce_slice(bucket);  // in the scope of `context`: a wait for a different step has failed
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
  // Ranks are never more than one step apart.
  const bool reduces = std::ranges::find(skipped_, false) != skipped_.end();
  reduces ? await_all(&BucketWords::reduced) : await_all(0, &BucketWords::skipped);
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
  await_all(context);
}

void BucketReducer::await_all(BucketWait& context) {
  for (int rank = 0; rank < blocks_.size(); ++rank) await(context, rank);
}

void BucketReducer::await(BucketWait& context, int rank) {
  using Clock = std::chrono::steady_clock;
  if (context.reached(rank)) return;
  const auto begin = Clock::now();
  region_->await(context.word(rank), blocks_.step(), rank, context);
  const int charged = context.is_for_gradients() ? region_->global_ranks().of(rank) : -1;
  waits_.push_back({static_cast<int>(context.bucket()), charged, begin, Clock::now()});
}

bool BucketReducer::abort_step() {
  if (!in_step_) return false;
  check_process();
  if (two_level_) {
    progress_->end();
    two_level_->cancel();
  }
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
  check_process();
  blocks_.fail({kind, {region_->global_ranks().of(region_->rank())}, text});
}

}  // namespace paceline::shm
