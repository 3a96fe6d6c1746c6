#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/collectives/operation.h"
#include "shm/kernels/types.h"
#include "shm/membership/failure.h"

namespace paceline::shm {

inline constexpr int kMaxRanks = 64;

// A rank's description of its collective call, published with a round.
struct CollectiveFingerprint {
  Operation operation = Operation::none;
  DataType type = DataType::byte;
  ReduceOp op = ReduceOp::sum;
  // Whether the ranks' parts differ in size: then `count` is zero and Splits has the sizes. Not a
  // bool: a damaged peer's may hold any value.
  std::uint8_t uneven = 0;
  // 1 in the closing round if this rank could not read the memory of another rank's process.
  std::uint8_t refused = 0;
  // 1 for a call of a group on several nodes. A node's group does not have all of its ranks, so
  // `root` is a global rank.
  std::uint8_t across_nodes = 0;
  std::int32_t root = 0;
  std::uint64_t count = 0;     // elements of each part
  std::uint64_t sequence = 0;  // the number of the call in the group, from 1
  // The most bytes that this rank passes to another rank through its staging buffers.
  std::uint64_t staged = 0;
  // The offset of this rank's tensor in the region, which other ranks read in place; or kNotShared.
  std::uint64_t offset = kNotShared;
  // The address of this rank's array of Inputs in its process, if other ranks are to read its parts
  // there with CrossMemoryReader; else 0.
  std::uint64_t inputs = 0;

  static constexpr std::uint64_t kNotShared = ~std::uint64_t{0};
  bool is_shared() const { return offset != kNotShared; }
  // Otherwise it passes through the staging buffers.
  bool is_read_in_place() const { return is_shared() || inputs != 0; }
};

// How many elements a rank gives to each other rank and expects from it, in an uneven call.
struct Splits {
  std::array<std::uint64_t, kMaxRanks> to;
  std::array<std::uint64_t, kMaxRanks> from;
};
// The same of a group of any size.
struct SplitRow {
  std::span<const std::uint64_t> to;
  std::span<const std::uint64_t> from;
};

// "all_reduce of 10 float32 with MAX".
std::string describe(const CollectiveFingerprint& call, const GlobalRanks& global_ranks);

// Why calls cannot be one collective. Every rank gets the same text.
struct Disagreement {
  // The group ranks at fault: the ranks that differ from the majority, or all ranks without one.
  RankSet ranks{};
  std::string text;
};
// Both take the calls of all ranks, by rank.
bool agree(std::span<const CollectiveFingerprint> calls);
Disagreement explain_disagreement(std::span<const CollectiveFingerprint> calls,
                                  const GlobalRanks& global_ranks);
// The same for descriptions.
Disagreement explain_disagreement(std::span<const std::string> calls,
                                  const GlobalRanks& global_ranks);
// The same for the splits of an uneven call, by rank; names no rank if they agree.
Disagreement compare_splits(std::span<const SplitRow> splits, const GlobalRanks& global_ranks);

}  // namespace paceline::shm
