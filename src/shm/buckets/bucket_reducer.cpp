#include "shm/buckets/bucket_reducer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include <paceline/error.h>

#include "shm/collectives/cross_wait.h"
#include "shm/kernels/kernels.h"

namespace paceline::shm {

class BucketReducer::BucketWait : public WaitContext {
 public:
  BucketWait(BucketReducer& reducer, std::size_t bucket, Word BucketWords::*word)
      : WaitContext({"backward", reducer.step_}, reducer.deadline_),
        reducer_(reducer),
        bucket_(bucket),
        word_(word) {}

  RankSet missing() const override {
    RankSet ranks;
    for (int rank = 0; rank < reducer_.region_->size(); ++rank) {
      const Word& word = reducer_.words(rank, bucket_).*word_;
      if (!Region::reached(word, reducer_.step_)) ranks.insert(rank);
    }
    return ranks;
  }
  std::string describe() const override {
    return fmt::format("backward, {}, bucket {} ({})", reducer_.position(), bucket_,
                       reducer_.describe_(bucket_));
  }
  std::string last_seen(int rank, bool /*missing*/) const override {
    return reducer_.buckets_of(rank);
  }
  // Not a failure of the group: all ranks may give the step up together and go on. What the peer
  // did before it gave up counts, so that all who wait for the same come to the same end.
  void check(int peer) const override {
    reducer_.check_not_skipped(peer, bucket_);
    const bool gave_up = Region::reached(reducer_.progress(peer).abandoned, reducer_.step_);
    const bool left = reducer_.region_->peers().has_left(peer);
    const auto call = cross_call(*reducer_.region_, peer);
    // What the peer did before any of that counts.
    if (Region::reached(reducer_.words(peer, bucket_).*word_, reducer_.step_)) return;
    if (!gave_up) return check_not_elsewhere(peer, left, call);
    // An exception that destroys the reducer mostly goes on to end the rank, and then tells more.
    const bool gone = reducer_.progress(peer).gone.load(std::memory_order_relaxed) != 0;
    if (gone && !left && !stands_for_a_second()) return;
    throw Mismatch(fmt::format("{} gave up {}: an exception ended its backward before bucket {} "
                               "({}) was ready",
                               reducer_.name_of(peer), reducer_.position(), bucket_,
                               reducer_.describe_(bucket_)),
                   {reducer_.region_->numbers().of(peer)}, op.operation, op.sequence);
  }

 private:
  // Inputs that are uneven show in this: some ranks go on training while others do what comes next.
  void check_not_elsewhere(int peer, bool left,
                           const std::optional<CollectiveFingerprint>& call) const {
    constexpr const char* kAdvice =
        "if the ranks have different numbers of batches, give all as many (DistributedSampler), or "
        "train inside join; if one ran a forward under no_sync alone, or its optimizer called a "
        "closure more often (LBFGS; return the loss averaged over the ranks), have all do the "
        "same; if an exception ended a backward, let a forward come next";
    if (left) {
      reducer_.region_->fail_lost(peer, fmt::format("{}: {}", describe(), kAdvice), op);
    }
    if (!call) first_seen_.reset();
    if (!call || !stands_for_a_second()) return;  // or another thread's first call is to come
    const std::string me = reducer_.name_of(reducer_.region_->rank());
    reducer_.region_->fail(
        {FailureKind::mismatch, reducer_.region_->numbers().of(elsewhere()),
         fmt::format("{} waits for {} in {}, call {}, while {} waits for it in {}: {}",
                     reducer_.name_of(peer), me, shm::describe(*call, reducer_.region_->numbers()),
                     call->sequence, me, describe(), kAdvice)},
        op);
  }
  // Those who have not begun the step, if most have; or the other way round.
  RankSet elsewhere() const {
    std::vector<std::string> where;
    for (int rank = 0; rank < reducer_.region_->size(); ++rank) {
      where.emplace_back(reducer_.has_begun(rank) ? "here" : "elsewhere");
    }
    return reducer_.those_apart(where);
  }
  bool stands_for_a_second() const {
    if (!first_seen_) first_seen_ = base::Deadline::after(std::chrono::seconds(1));
    return first_seen_->expired();
  }

  const BucketReducer& reducer_;
  std::size_t bucket_;
  Word BucketWords::*word_;
  mutable std::optional<base::Deadline> first_seen_;
};

class BucketReducer::AbandonWait : public WaitContext {
 public:
  explicit AbandonWait(BucketReducer& reducer)
      : WaitContext({"forward", reducer.step_}, reducer.deadline_), reducer_(reducer) {}
  RankSet missing() const override {
    RankSet ranks;
    for (int rank = 0; rank < reducer_.region_->size(); ++rank) {
      if (!Region::reached(reducer_.progress(rank).abandoned, reducer_.step_)) {
        ranks.insert(rank);
      }
    }
    return ranks;
  }
  std::string describe() const override {
    return "giving up " + reducer_.position() + ", whose backward did not complete";
  }
  void check(int peer) const override { reducer_.check_not_finished(peer); }

 private:
  const BucketReducer& reducer_;
};

BucketReducer::BucketReducer(Group& group, std::span<const Bucket> buckets, Describe describe,
                             std::uint32_t steps, std::vector<std::string> parameters)
    : region_(group.region()),
      buckets_(buckets.begin(), buckets.end()),
      describe_(std::move(describe)),
      parameters_(std::move(parameters)),
      places_(buckets.size()),
      step_(steps),
      deadline_{group.timeout()} {
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    void* const memory = region_->allocate_or_throw(bytes_of(b));
    data_.emplace_back(static_cast<std::byte*>(memory),
                       [region = region_](std::byte* pointer) { region->memory().free(pointer); });
  }
  control_ = static_cast<std::byte*>(region_->allocate_or_throw(control_bytes()));
  std::memset(control_, 0, control_bytes());
  // Peers see them from the exchange on. Zero would seem to lie ahead of late steps.
  auto* const own = reinterpret_cast<Progress*>(control_);
  own->abandoned = own->finished = step_;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = reinterpret_cast<BucketWords*>(own + 1)[b];
    bucket.published = bucket.reduced = bucket.skipped = step_;
  }
  exchange_control_blocks(group);
  for (std::size_t b = 0; b < buckets_.size(); ++b) place(b, data_[b].get());
}

BucketReducer::~BucketReducer() {
  if (region_->in_forked_child()) return;
  if (in_step_) {
    progress(region_->rank()).gone.store(1, std::memory_order_relaxed);
    region_->publish(progress(region_->rank()).abandoned, step_);
  }
  retire_all();
}

// A peer may have yet to read the words of a step that is finished here, so the control block is
// never reused, small as it is.
void BucketReducer::retire_all() {
  region_->memory().retire(control_);
  if (!in_step_) return;
  for (const auto& memory : data_) region_->memory().retire(memory.get());
  for (void* const memory : places_) region_->memory().retire(memory);
}

void BucketReducer::exchange_control_blocks(Group& group) {
  struct Row {
    std::uint64_t control;
    std::uint64_t buckets;
    std::uint64_t bytes;  // of all of them
  };
  constexpr std::size_t kWords = sizeof(Row) / sizeof(std::uint64_t);
  Row mine{*region_->memory().shared_offset(control_, 0), buckets_.size(), 0};
  for (std::size_t b = 0; b < buckets_.size(); ++b) mine.bytes += bytes_of(b);
  std::vector<Row> rows(static_cast<std::size_t>(region_->size()));
  std::vector<Output> outputs;
  for (Row& row : rows) outputs.push_back({&row, kWords});
  group.all_gather({&mine, kWords}, outputs, DataType::int64);

  std::vector<std::string> plans;
  for (const Row& row : rows) {
    plans.push_back(fmt::format("{} buckets of {} bytes in all", row.buckets, row.bytes));
  }
  for (int rank = 0; rank < region_->size(); ++rank) {
    const Row& row = rows[static_cast<std::size_t>(rank)];
    const std::string& plan = plans[static_cast<std::size_t>(rank)];
    if (plan != plans[0]) {
      fail(those_apart(plans),
           fmt::format("gradients lie in {} on {}, and in {} on {}: DistributedDataParallel needs "
                       "the same options on every rank",
                       plans[0], name_of(0), plan, name_of(rank)));
    }
    std::byte* const found = region_->memory().resolve(rank, row.control, control_bytes());
    if (found == nullptr || row.control % kCacheLine != 0) {
      fail({rank}, name_of(rank) + " published memory that is not its own");
    }
    progress_.push_back(reinterpret_cast<Progress*>(found));
  }
}

// Progress, words of each bucket, frozen flags.
std::size_t BucketReducer::control_bytes() const {
  return sizeof(Progress) + buckets_.size() * sizeof(BucketWords) + parameters_.size();
}

std::uint8_t* BucketReducer::frozen_flags(int rank) const {
  return reinterpret_cast<std::uint8_t*>(&words(rank, buckets_.size()));
}

StepSummary BucketReducer::summary_of(int rank) const {
  const Progress& said = progress(rank);
  return {.forwards = said.forwards.load(std::memory_order_relaxed),
          .local_forwards = said.local_forwards.load(std::memory_order_relaxed),
          .frozen = said.frozen.load(std::memory_order_relaxed),
          .modifications = said.modifications.load(std::memory_order_relaxed),
          .joined = said.joined.load(std::memory_order_relaxed)};
}

// Whether a rank has published or skipped anything in this step: so what it says of it is there.
bool BucketReducer::has_begun(int rank) const {
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const BucketWords& theirs = words(rank, bucket);
    if (Region::reached(theirs.published, step_)) return true;
    if (theirs.skipped.load(std::memory_order_acquire) == step_) return true;
  }
  return false;
}

std::size_t BucketReducer::bytes_of(std::size_t bucket) const {
  return buckets_[bucket].count * element_size(buckets_[bucket].type);
}

void BucketReducer::place(std::size_t bucket, void* memory) {
  places_[bucket] = memory;
  words(region_->rank(), bucket)
      .offset.store(*region_->memory().shared_offset(memory, 0), std::memory_order_relaxed);
}

// A rank's bucket, once it is published.
void* BucketReducer::find(int rank, std::size_t bucket) {
  const auto offset = words(rank, bucket).offset.load(std::memory_order_relaxed);
  void* const found = region_->memory().resolve(rank, offset, bytes_of(bucket));
  if (found == nullptr || offset % kCacheLine != 0) {
    fail({rank}, fmt::format("{} published memory that is not its own as bucket {} ({})",
                             name_of(rank), bucket, describe_(bucket)));
  }
  return found;
}

BucketReducer::BucketWords& BucketReducer::words(int rank, std::size_t bucket) const {
  return reinterpret_cast<BucketWords*>(&progress(rank) + 1)[bucket];
}

std::string BucketReducer::name_of(int rank) const {
  return fmt::format("rank {}", region_->numbers().of(rank));
}

std::string BucketReducer::position() const {
  return fmt::format("step {} of group {}", step_, region_->options().name);
}

void BucketReducer::begin_step(const StepSummary& summary, double weight, FrozenFlags frozen) {
  region_->check_usable({"backward", step_ + 1});
  ++step_;
  in_step_ = true;
  beginnings_checked_ = false;
  pending_.clear();
  region_->threads().note_this_thread();
  skipped_.assign(buckets_.size(), false);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (places_[b] != data_[b].get()) place(b, data_[b].get());
  }
  // Read by those who have seen a bucket of this step published.
  Progress& own = progress(region_->rank());
  if (own.frozen.load(std::memory_order_relaxed) != summary.frozen) {
    std::copy_n(frozen.begin(), std::min(frozen.size(), parameters_.size()),
                frozen_flags(region_->rank()));
  }
  own.forwards.store(summary.forwards, std::memory_order_relaxed);
  own.local_forwards.store(summary.local_forwards, std::memory_order_relaxed);
  own.frozen.store(summary.frozen, std::memory_order_relaxed);
  own.modifications.store(summary.modifications, std::memory_order_relaxed);
  own.joined.store(summary.joined, std::memory_order_relaxed);
  own.weight.store(weight, std::memory_order_relaxed);
  // Kept near the step, or it would one day seem to lie ahead of it.
  own.abandoned.store(step_ - 1, std::memory_order_release);
}

bool BucketReducer::use_in_place(std::size_t bucket, void* memory) {
  if (!region_->memory().holds(memory, bytes_of(bucket))) return false;
  place(bucket, memory);
  return true;
}

void BucketReducer::publish(std::size_t bucket) {
  pending_.push_back(bucket);
  progress(region_->rank())
      .last.store(static_cast<std::uint32_t>(bucket), std::memory_order_relaxed);
  region_->publish(words(region_->rank(), bucket).published, step_);
}

void BucketReducer::skip(std::size_t bucket) {
  skipped_[bucket] = true;
  BucketWords& own = words(region_->rank(), bucket);
  // Kept near the step, as a bucket may be skipped for long.
  own.published.store(step_ - 1, std::memory_order_relaxed);
  own.reduced.store(step_ - 1, std::memory_order_relaxed);
  region_->publish(own.skipped, step_);
}

double BucketReducer::share() const {
  return weights_.empty() ? 1.0 / region_->size()
                          : weights_[static_cast<std::size_t>(region_->rank())];
}

bool BucketReducer::published_by_all(std::size_t bucket) const {
  for (int rank = 0; rank < region_->size(); ++rank) {
    if (!Region::reached(words(rank, bucket).published, step_)) return false;
  }
  return true;
}

void BucketReducer::try_progress() {
  std::erase_if(pending_, [&](std::size_t bucket) {
    if (!published_by_all(bucket)) return false;
    reduce_slice(bucket);
    return true;
  });
}

void BucketReducer::reduce_slice(std::size_t bucket) {
  if (!beginnings_checked_) check_beginnings();
  const auto& [count, type, op] = buckets_[bucket];
  const Slice slice = slice_of(count, element_size(type), region_->rank(), region_->size());
  std::array<void*, kMaxRanks> parts;
  for (int rank = 0; rank < region_->size(); ++rank) {
    parts[static_cast<std::size_t>(rank)] =
        static_cast<std::byte*>(find(rank, bucket)) + slice.begin * element_size(type);
  }
  // One rank alone has its own average already, to the bit.
  if (progress_.size() > 1) {
    reduce_parts(buckets_[bucket], std::span(parts).first(progress_.size()), slice.count());
  }
  region_->publish(words(region_->rank(), bucket).reduced, step_);
}

// The parts are sources and destinations alike.
void BucketReducer::reduce_parts(const Bucket& bucket, std::span<void* const> parts,
                                 std::size_t count) const {
  const std::span sources(const_cast<const void* const*>(parts.data()), parts.size());
  if (bucket.op != ReduceOp::avg || weights_.empty()) {
    return reduce(bucket.type, bucket.op, sources, parts, count);
  }
  std::array<const void*, kMaxRanks> counted;
  std::array<double, kMaxRanks> weights;
  std::size_t used = 0;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (weights_[rank] == 0) continue;
    counted[used] = sources[rank];
    weights[used++] = weights_[rank];
  }
  reduce_weighted(bucket.type, std::span(counted).first(used), std::span(weights).first(used),
                  parts, count);
}

void BucketReducer::check_beginnings() {
  beginnings_checked_ = true;
  read_weights();
  modified_apart_ = false;
  const StepSummary first = summary_of(0);
  bool same = true;
  for (int rank = 1; rank < region_->size(); ++rank) same = same && summary_of(rank) == first;
  if (same) return;
  std::vector<StepSummary> all;
  std::vector<FrozenFlags> flags;
  for (int rank = 0; rank < region_->size(); ++rank) {
    all.push_back(summary_of(rank));
    flags.emplace_back(frozen_flags(rank), all.back().joined != 0 ? 0 : parameters_.size());
  }
  const Disagreement forwards = compare_forwards(all, region_->numbers());
  if (!forwards.ranks.empty())
    fail(forwards.ranks, fmt::format("in {} {}", position(), forwards.text));
  if (differ_in_frozen(all)) check_frozen(flags);
  modified_apart_ = differ_in_modifications(all);
}

void BucketReducer::check_frozen(std::span<const FrozenFlags> flags) const {
  const Disagreement frozen = compare_frozen(flags, parameters_, region_->numbers());
  if (frozen.ranks.empty()) return;
  region_->fail({FailureKind::mismatch, region_->numbers().of(frozen.ranks),
                 fmt::format("in {} {}", position(), frozen.text)},
                {"backward", step_});
}

void BucketReducer::read_weights() {
  weights_.clear();
  double total = 0;
  bool same = true;
  for (int rank = 0; rank < region_->size(); ++rank) {
    weights_.push_back(progress(rank).weight.load(std::memory_order_relaxed));
    same = same && weights_.back() == weights_.front();
    total += weights_.back();
  }
  if (!(total > 0) || !std::isfinite(total)) {
    fail(RankSet::all(region_->size()),
         fmt::format("in {} the ranks' weights add up to {}: there is nothing to average",
                     position(), total));
  }
  if (same) weights_.clear();
  for (double& weight : weights_) weight /= total;
}

void BucketReducer::finish() {
  deadline_.deadline.reset();
  waits_.clear();
  for (const std::size_t bucket : pending_) {
    await_all(bucket, &BucketWords::published);
    reduce_slice(bucket);
  }
  pending_.clear();
  // Only now is every rank on its way to finish, where it may have waits of its own first.
  deadline_.deadline.reset();
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!skipped_[bucket]) await_all(bucket, &BucketWords::reduced);
  }
  progress(region_->rank()).finished.store(step_, std::memory_order_release);
  in_step_ = false;
}

void BucketReducer::await_all(std::size_t bucket, Word BucketWords::*word) {
  using Clock = std::chrono::steady_clock;
  BucketWait context(*this, bucket, word);
  for (int rank = 0; rank < region_->size(); ++rank) {
    const Word& theirs = words(rank, bucket).*word;
    if (Region::reached(theirs, step_)) continue;
    const auto begin = Clock::now();
    region_->await(theirs, step_, rank, context);
    waits_.push_back({static_cast<int>(bucket), region_->numbers().of(rank), begin, Clock::now()});
  }
}

bool BucketReducer::is_reduced(std::size_t bucket) const {
  for (int rank = 0; rank < region_->size(); ++rank) {
    if (!Region::reached(words(rank, bucket).reduced, step_)) return false;
  }
  return true;
}

void BucketReducer::check_not_skipped(int peer, std::size_t bucket) const {
  // No other step: it is refreshed only where the bucket is skipped again.
  if (words(peer, bucket).skipped.load(std::memory_order_acquire) != step_) return;
  std::vector<FrozenFlags> flags;  // what is frozen is not used
  for (int rank = 0; rank < region_->size(); ++rank) {
    flags.emplace_back(frozen_flags(rank), has_begun(rank) ? parameters_.size() : 0);
  }
  check_frozen(flags);
  region_->fail(
      {FailureKind::mismatch,
       {region_->numbers().of(peer)},
       fmt::format("in {} {} had nothing for bucket {} ({}), which {} did use: "
                   "skip_all_reduce_unused_params wants the same parameters to be unused "
                   "on every rank",
                   position(), name_of(peer), bucket, describe_(bucket), name_of(region_->rank()))},
      {"backward", step_});
}

// How far it has come in this step.
std::string BucketReducer::buckets_of(int rank) const {
  std::size_t ready = 0;
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (Region::reached(words(rank, bucket).published, step_)) ++ready;
  }
  if (ready == 0) return "it has no bucket of this step ready";
  const std::size_t last = progress(rank).last.load(std::memory_order_relaxed);
  return fmt::format("it has {} of {} buckets ready, {} ({}) last", ready, buckets_.size(), last,
                     last < buckets_.size() ? describe_(last) : "there is none");
}

bool BucketReducer::abandon_step() {
  if (!in_step_) return false;
  region_->check_usable({"forward", step_});
  region_->publish(progress(region_->rank()).abandoned, step_);
  deadline_.deadline.reset();
  AbandonWait context(*this);
  for (int rank = 0; rank < region_->size(); ++rank) {
    region_->await(progress(rank).abandoned, step_, rank, context);
    check_not_finished(rank);
  }
  in_step_ = false;
  return true;
}

void BucketReducer::check_not_finished(int peer) const {
  if (!Region::reached(progress(peer).finished, step_)) return;
  const int mine = region_->rank();
  region_->fail({FailureKind::mismatch,
                 {region_->numbers().of(mine)},
                 fmt::format("an exception ended the backward of {} in {} after all gradients were "
                             "reduced: {} finished the step, so the models may differ from here on",
                             name_of(mine), position(), name_of(peer))},
                {"forward", step_});
}

void BucketReducer::fail(const std::string& text, FailureKind kind) {
  region_->fail({kind, {region_->numbers().of(region_->rank())}, text}, {"backward", step_});
}

void BucketReducer::fail(const RankSet& ranks, const std::string& text) {
  region_->fail({FailureKind::mismatch, region_->numbers().of(ranks), text}, {"backward", step_});
}

// Those who say something else than most, by what each rank says; all, if there is no majority.
RankSet BucketReducer::those_apart(std::span<const std::string> said) const {
  return explain_disagreement(said, region_->numbers()).ranks;
}

}  // namespace paceline::shm
