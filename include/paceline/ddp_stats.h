#pragma once

/// @file
/// Times and sizes of DistributedDataParallel's steps.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace paceline {

/// Times and sizes of one synchronised step of DistributedDataParallel on this rank. The terms are
/// from PyTorch's DDP logging data.
struct StepStats {
  /// All durations.
  using Duration = std::chrono::nanoseconds;
  Duration forward{};        ///< In the module's forward, all forwards of the step together.
  Duration backward{};       ///< From the end of the forward until the last gradient was ready.
  Duration communication{};  ///< From the first ready bucket until all buckets were reduced.
  Duration overlap{};        ///< The part of `communication` during `backward`.
  Duration waiting{};        ///< Blocked on other ranks, before the forward and after the backward.
  std::size_t buckets = 0;   ///< Reduced buckets.
  std::size_t bytes = 0;     ///< Bytes in these buckets.
  std::size_t copied = 0;    ///< Bytes of gradients that were copied into their buckets.
};

/// Statistics of DistributedDataParallel's steps on this rank.
struct DdpStats {
  std::uint64_t steps = 0;  ///< Synchronised steps since construction.
  StepStats last{};         ///< The last of them.
  StepStats total{};        ///< Their sum.
  /// The share of communication that was hidden behind the backward, from 0 to 1.
  double hidden() const {
    const auto all = total.communication.count();
    return all == 0 ? 0 : static_cast<double>(total.overlap.count()) / static_cast<double>(all);
  }
};

}  // namespace paceline
