#pragma once

/// @file
/// What the servers of a ParameterServer have done.

#include <chrono>
#include <cstdint>
#include <map>

namespace paceline {

/// What a server has done for one worker. Messages carry each tensor, padded to 64 bytes, and a
/// byte for each.
struct ParameterServerWorkerStats {
  std::int64_t updates = 0;           ///< Gradients of this worker that the optimizer has taken.
  std::chrono::nanoseconds waited{};  ///< From the arrival of its gradients to their steps, in all.
  std::int64_t bytes_sent = 0;        ///< Parameters, to all its processes.
  std::int64_t bytes_received = 0;    ///< Gradients, of all its processes.
};

/// What a server has done so far.
struct ParameterServerStats {
  std::int64_t version =
      0;  ///< Steps of the optimizer. In synchronous mode each takes many updates.
  std::map<int, ParameterServerWorkerStats> workers{};  ///< By rank; of every worker.
  /// How many updates had which staleness: the version that they were applied to, minus the version
  /// that the worker computed them at.
  std::map<std::int64_t, std::int64_t> staleness{};
  /// The most steps that a worker was ahead of the slowest living one when its update was applied.
  std::int64_t largest_lead = 0;
};

}  // namespace paceline
