#include "shm/membership/failure.h"

#include <fmt/format.h>
#include <sched.h>

#include <paceline/error.h>

#include <algorithm>

#include "base/deadline.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {

bool FailureRecord::record(const Failure& failure) {
  std::uint32_t expected = kEmpty;
  if (!state_.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) return false;
  fault_point();
  const std::size_t length = std::min(failure.text.size(), kMaxText);
  for (std::size_t i = 0; i < length; ++i) {
    text_[i].store(failure.text[i], std::memory_order_relaxed);
  }
  length_.store(static_cast<std::uint32_t>(length), std::memory_order_relaxed);
  ranks_.store(failure.ranks, std::memory_order_relaxed);
  kind_.store(static_cast<std::uint32_t>(failure.kind), std::memory_order_relaxed);
  state_.store(kComplete, std::memory_order_release);
  return true;
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
  failure.ranks = ranks_.load(std::memory_order_relaxed);
  const std::size_t length =
      std::min<std::size_t>(length_.load(std::memory_order_relaxed), kMaxText);
  failure.text.resize(length);
  for (std::size_t i = 0; i < length; ++i) {
    failure.text[i] = text_[i].load(std::memory_order_relaxed);
  }
  return failure;
}

std::vector<int> GlobalRanks::list(std::uint64_t bits) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < 64; ++rank) {
    if ((bits >> rank) & 1) ranks.push_back(of(rank));
  }
  return ranks;
}

std::string describe_ranks(const std::vector<int>& ranks) {
  if (ranks.empty()) return "no rank";
  std::string text = fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", ranks.front());
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    text += fmt::format("{}{}", i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  }
  return text;
}

void throw_failure(const Failure& failure, const OpContext& op, const GlobalRanks& numbers) {
  const auto ranks = numbers.list(failure.ranks);
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
