#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "distributed/backend.h"
#include "distributed/topology.h"

namespace paceline::distributed {

// What the world and new_group have in common. `backends`: see parse_backends.

// The timeout, no longer than Deadline::kLongest: LibTorch computes with it unchecked. Throws
// UsageError unless it is positive.
std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout);
// Throws UsageError if the groups of the backend for CPU tensors are smaller, wherever their ranks
// run.
void check_size(const std::string& backends, int ranks);
// Throws UsageError if the ranks run on several nodes and the backend reaches one only, or if they
// are more than it can have on one node.
void check_reach(const std::string& backends, const std::string& group, const Topology& topology,
                 std::span<const int> ranks);

// By group rank; empty if there is one node.
std::vector<int> nodes_of(const Topology& topology, std::span<const int> ranks);

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const std::string& backends,
                                                  BackendRequest request);

}  // namespace paceline::distributed
