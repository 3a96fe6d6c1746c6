#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace paceline {

// What one synchronised step of DistributedDataParallel took on this rank, in the terms of
// PyTorch's own log of it.
struct StepStats {
  using Duration = std::chrono::nanoseconds;
  Duration forward{};        // in the module's forward, of all forwards of the step
  Duration backward{};       // from there until the last gradient was ready
  Duration communication{};  // from the first bucket that was ready until all were reduced
  Duration overlap{};        // the part of that which lies within backward
  Duration waiting{};        // blocked on other ranks, before the forward and after the backward
  std::size_t buckets = 0;   // that were reduced
  std::size_t bytes = 0;     // in them
  std::size_t copied = 0;    // bytes of gradients that had to be copied into their bucket
};

struct DdpStats {
  std::uint64_t steps = 0;  // synchronised ones, since construction
  StepStats last{};         // the last of them
  StepStats total{};        // their sum
  // How much of the communication was hidden behind backward, of 1.
  double hidden() const {
    const auto all = total.communication.count();
    return all == 0 ? 0 : static_cast<double>(total.overlap.count()) / static_cast<double>(all);
  }
};

}  // namespace paceline
