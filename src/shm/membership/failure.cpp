#include "shm/membership/failure.h"

#include <fmt/format.h>
#include <sched.h>

#include <paceline/error.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "base/deadline.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {
namespace {

// At most kMaxText; a longer text is cut before a character of UTF-8, since Python decodes it.
std::size_t length_of_text(std::string_view text) {
  std::size_t length = std::min(text.size(), FailureRecord::kMaxText);
  while (length > 0 && length < text.size() && (text[length] & 0xC0) == 0x80) --length;
  return length;
}

}  // namespace

void FailureRecord::record(const Failure& failure) {
  std::uint32_t expected = kEmpty;
  if (!state_.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) return;
  fault_point();
  const std::size_t length = length_of_text(failure.text);
  for (std::size_t i = 0; i < length; ++i) {
    text_[i].store(failure.text[i], std::memory_order_relaxed);
  }
  length_.store(static_cast<std::uint32_t>(length), std::memory_order_relaxed);
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    ranks_[i].store(failure.ranks.words()[i], std::memory_order_relaxed);
  }
  kind_.store(static_cast<std::uint32_t>(failure.kind), std::memory_order_relaxed);
  state_.store(kComplete, std::memory_order_release);
}

Failure FailureRecord::read() const {
  // Writing takes microseconds, on a busy machine some more; a writer that does not finish has
  // died.
  const auto deadline = base::Deadline::after(std::chrono::milliseconds(200));
  while (state_.load(std::memory_order_acquire) == kWriting && !deadline.expired()) ::sched_yield();
  Failure failure;
  if (state_.load(std::memory_order_acquire) != kComplete) {
    failure.kind = FailureKind::peer_lost;
    failure.text = "a rank was lost while it reported a failure";
    return failure;
  }
  const auto kind = kind_.load(std::memory_order_relaxed);
  failure.kind = kind <= static_cast<std::uint32_t>(FailureKind::mismatch)
                     ? static_cast<FailureKind>(kind)
                     : FailureKind::peer_lost;
  RankSet::Words words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = ranks_[i].load(std::memory_order_relaxed);
  }
  failure.ranks = RankSet(words);
  const std::size_t length =
      std::min<std::size_t>(length_.load(std::memory_order_relaxed), kMaxText);
  failure.text.resize(length);
  for (std::size_t i = 0; i < length; ++i) {
    failure.text[i] = text_[i].load(std::memory_order_relaxed);
  }
  return failure;
}

GlobalRanks::GlobalRanks(std::vector<int> ranks, std::vector<int> nodes)
    : ranks_(std::move(ranks)), nodes_(std::move(nodes)) {
  for (const int rank : ranks_) {
    if (rank >= 0 && rank < kMaxWorldSize) continue;
    throw UsageError(
        fmt::format("a group with rank {} of the world: ranks from 0 to {} are allowed", rank,
                    kMaxWorldSize - 1));
  }
}

RankSet GlobalRanks::of(const RankSet& group_ranks) const {
  RankSet global;
  for (const int rank : group_ranks) global.insert(of(rank));
  return global;
}

std::string GlobalRanks::describe(const RankSet& group_ranks) const {
  return describe_global(of(group_ranks));
}

std::string GlobalRanks::describe_global(const RankSet& global) const {
  std::map<int, RankSet> by_node;
  RankSet without_node = global;
  for (std::size_t rank = 0; rank < nodes_.size(); ++rank) {
    const int number = of(static_cast<int>(rank));
    if (!global.contains(number)) continue;
    by_node[nodes_[rank]].insert(number);
    without_node -= {number};
  }
  if (!without_node.empty()) by_node[-1] = without_node;
  if (by_node.size() > kMaxListed) {
    return fmt::format("{} on {} nodes", describe_ranks(global), by_node.size());
  }
  std::string text;
  for (const auto& [node, ranks] : by_node) {
    text += fmt::format("{}{}", text.empty() ? "" : " and ", describe_ranks(ranks));
    if (node >= 0) text += fmt::format(" on node {}", node);
  }
  return text.empty() ? describe_ranks({}) : text;
}

Failure failure_of(const PeerError& error) {
  FailureKind kind = FailureKind::peer_lost;
  if (dynamic_cast<const Timeout*>(&error) != nullptr) kind = FailureKind::timeout;
  if (dynamic_cast<const Mismatch*>(&error) != nullptr) kind = FailureKind::mismatch;
  return {kind, RankSet(error.ranks()), error.what()};
}

void throw_failure(const Failure& failure, const OpContext& op) {
  const auto ranks = failure.ranks.list();
  switch (failure.kind) {
    case FailureKind::timeout:
      throw Timeout(failure.text, ranks, op.operation, op.sequence);
    case FailureKind::mismatch:
      throw Mismatch(failure.text, ranks, op.operation, op.sequence);
    case FailureKind::none:
    case FailureKind::peer_lost:
      break;
  }
  throw PeerLost(failure.text, ranks, op.operation, op.sequence);
}

}  // namespace paceline::shm
