#include "shm/collectives/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include <paceline/error.h>

#include "shm/collectives/call_state.h"

namespace paceline::shm {

// Waits for a round of the current call.
class Group::RoundWait : public WaitContext {
 public:
  explicit RoundWait(Group& group)
      : WaitContext(group.context(), group.deadline()), group_(group) {}

  RankSet missing() const override {
    RankSet ranks;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const Word& word = group_.region_->memory().slot(rank, group_.round_).round;
      if (!Region::reached(word, group_.round_)) ranks.insert(rank);
    }
    return ranks;
  }
  RankSet missing_on_other_nodes() const override {
    return outer() != nullptr ? outer()->missing_on_other_nodes(missing()) : RankSet();
  }
  bool may_learn_more() override {
    return outer() != nullptr && outer()->may_learn_more(missing());
  }
  std::string describe_on_other_nodes(const RankSet& ranks) const override {
    return outer() != nullptr ? outer()->describe_on_other_nodes(ranks) : describe_ranks(ranks);
  }
  std::string describe() const override { return group_.describe_call(); }
  std::string last_seen(int rank, bool missing) const override {
    return missing ? group_.last_call_of(rank) : "";
  }

 private:
  OuterCall* outer() const { return group_.outer_call_; }

  const Group& group_;
};

Group::Group(std::shared_ptr<Region> region)
    : Collectives(region->options().timeout),
      region_(std::move(region)),
      calls_(static_cast<std::size_t>(size())) {}

void check_root(const char* operation, std::int64_t root, int size) {
  if (root >= 0 && root < size) return;
  throw UsageError(
      fmt::format("{} with root {}: the group has ranks 0 to {}", operation, root, size - 1));
}

void check_arguments(const CollectiveFingerprint& call, int size) {
  const OperationTraits operation = traits(call.operation);
  if (operation.root != RootRole::none) check_root(operation.name, call.root, size);
  if (!operation.reduces || is_reducible(call.type, call.op)) return;
  throw UsageError(fmt::format("{} of {} with {}: unsupported combination", operation.name,
                               name(call.type), name(call.op)));
}

void Group::begin(CollectiveFingerprint call) {
  check_arguments(call, size());
  region_->threads().note_this_thread();
  call_ = call;
  call_.sequence = ++sequence_;
  begin_deadline();
  region_->check_usable(context());
}

void Group::set_splits(std::span<const Input> to, std::span<const Output> from) {
  call_.uneven = 1;
  call_.count = 0;
  for (std::size_t peer = 0; peer < calls_.size(); ++peer) {
    own_splits_.to[peer] = to[to.size() == 1 ? 0 : peer].count;
    own_splits_.from[peer] = from[from.size() == 1 ? 0 : peer].count;
  }
}

void Group::first_round() {
  if (call_.uneven) region_->memory().splits(rank(), round_ + 1) = own_splits_;
  RoundWait context(*this);
  next_round(context);
  for (int peer = 0; peer < size(); ++peer) {
    calls_[static_cast<std::size_t>(peer)] = region_->memory().slot(peer, round_).call;
  }
  check_agreement();  // in the scope of `context`: a wait for another call has failed
}

void Group::next_round() {
  RoundWait context(*this);
  next_round(context);
}

void Group::next_round(RoundWait& context) {
  ++round_;
  // With every round: the other slot may hold a call from before this one, and a rank that waits
  // for this one looks into both.
  region_->memory().slot(rank(), round_).call = call_;
  if (shown_) region_->memory().outer_call(rank(), round_) = *shown_;
  region_->publish(region_->memory().slot(rank(), round_).round, round_);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank())
      region_->await(region_->memory().slot(peer, round_).round, round_, peer, context);
  }
}

void Group::check_agreement() {
  if (!agree(calls_)) {
    const auto found = explain_disagreement(calls_, region_->global_ranks());
    fail(found.ranks, found.text);
  }
  if (call_.uneven) {
    std::vector<SplitRow> splits;
    for (int peer = 0; peer < size(); ++peer) {
      const auto& [to, from] = region_->memory().splits(peer, round_);
      splits.push_back({std::span(to).first(calls_.size()), std::span(from).first(calls_.size())});
    }
    const auto found = compare_splits(splits, region_->global_ranks());
    if (!found.ranks.empty()) {
      fail(found.ranks, describe(call_, region_->global_ranks()) + ": " + found.text);
    }
  }
  for (int peer = 0; peer < size(); ++peer) {
    const CollectiveFingerprint& call = calls_[static_cast<std::size_t>(peer)];
    const bool may_be_read = traits(call_.operation).single_copy && may_read_processes_;
    if (call.staged <= largest_part_of(peer) && (call.inputs == 0 || may_be_read)) continue;
    fail({peer}, fmt::format("rank {} published an invalid call descriptor",
                             region_->global_ranks().of(peer)));
  }
}

void Group::fail(const RankSet& ranks, const std::string& text) {
  region_->fail({FailureKind::mismatch, region_->global_ranks().of(ranks),
                 fmt::format("{}; call {} of group {}", text, sequence_, region_->options().name)},
                {name(call_.operation), sequence_});
}

std::string Group::describe_call() const {
  if (outer_call_ != nullptr) return outer_call_->describe();
  return fmt::format("{}, call {} of group {}", describe(call_, region_->global_ranks()), sequence_,
                     region_->options().name);
}

// `rank` has not reached this rank's round yet.
std::string Group::last_call_of(int rank) const {
  const CollectiveFingerprint call = copy_call(*region_, rank, round_ - 1);
  // The rank writes there again only after it has arrived. A read-modify-write, which the copy
  // cannot pass.
  Word& came = region_->memory().slot(rank, round_).round;
  if (came.fetch_add(0, std::memory_order_acq_rel) == round_) return "it arrived just now";
  const bool comparable = (call.across_nodes != 0) == (outer_call_ != nullptr);
  if (comparable && call.sequence == context().sequence) {
    return "it stopped in the middle of this call";
  }
  if (call.operation == Operation::none) return "it has made no call yet";
  return fmt::format("its last was call {}, {}", call.sequence,
                     describe(call, region_->global_ranks()));
}

bool Group::any_shared() const {
  return std::any_of(calls_.begin(), calls_.end(), std::mem_fn(&CollectiveFingerprint::is_shared));
}

bool Group::all_shared() const {
  return std::all_of(calls_.begin(), calls_.end(), std::mem_fn(&CollectiveFingerprint::is_shared));
}

bool Group::has_one_reader() const {
  return size() == 2 || traits(call_.operation).root == RootRole::destination;
}

std::uint64_t Group::offset_of(const void* pointer, std::size_t bytes) const {
  return region_->memory()
      .shared_offset(pointer, bytes)
      .value_or(CollectiveFingerprint::kNotShared);
}

// Shared if the parts follow each other in memory.
std::uint64_t Group::offset_of(std::span<const Input> parts) const {
  std::size_t bytes = 0;
  for (const Input& part : parts) {
    if (part.data != static_cast<const std::byte*>(parts[0].data) + bytes)
      return CollectiveFingerprint::kNotShared;
    bytes += part.count * element();
  }
  return parts.empty() ? CollectiveFingerprint::kNotShared : offset_of(parts[0].data, bytes);
}

// In bytes; the part for the rank itself does not count.
std::size_t Group::largest_part_of(int rank) const {
  if (!call_.uneven) return call_.count * element();
  std::uint64_t largest = 0;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank) continue;
    largest = std::max(largest,
                       region_->memory().splits(rank, round_).to[static_cast<std::size_t>(peer)]);
  }
  return largest * element();
}

std::byte* Group::shared_part(int rank, std::size_t begin, std::size_t bytes) {
  const std::uint64_t offset = calls_[static_cast<std::size_t>(rank)].offset + begin;
  if (std::byte* const address = region_->memory().resolve(rank, offset, bytes)) return address;
  fail({rank}, fmt::format("rank {} published memory that is not its own (offset {}) in {}",
                           region_->global_ranks().of(rank), offset,
                           describe(call_, region_->global_ranks())));
}

std::byte* Group::shared_part_for_me(int from, std::size_t bytes) {
  std::size_t before = call_.count * static_cast<std::size_t>(rank());
  if (call_.uneven) {
    const auto& to = region_->memory().splits(from, round_).to;
    for (int peer = 0; peer < rank(); ++peer) before += to[static_cast<std::size_t>(peer)];
  }
  return shared_part(from, before * element(), bytes);
}

Slice slice_of(std::size_t count, std::size_t element_size, int rank, int size) {
  const std::size_t line = kCacheLine / element_size;
  const std::size_t lines = (count + line - 1) / line;
  const auto border = [&](int r) {
    const auto ranks = static_cast<std::size_t>(size);
    const auto at = static_cast<std::size_t>(r);
    return std::min(count, line * (lines / ranks * at + std::min(at, lines % ranks)));
  };
  return {border(rank), border(rank + 1)};
}

}  // namespace paceline::shm
