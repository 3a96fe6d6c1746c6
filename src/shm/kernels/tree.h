#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline::shm {

inline constexpr std::size_t kMaxSources = 64;

// The order in which a reduction combines its sources: a binary tree over leaves 0, 1, 2, ... Node
// i of level k reduces the leaves [i 2^k, (i + 1) 2^k). It combines nodes 2i and 2i + 1 of the
// level below, in this order; if there is no leaf below one of them, it is the other. Level 0 has
// the leaves themselves.
//
// A source may be a leaf or any node. So the result depends on the leaves only, not on who has
// reduced which of them before.
class Tree {
 public:
  // The next sources, 1, 2 or 4, are the leaves of a tree of their own. As many times as `folds`
  // says its root is then combined with the latest of the roots before it that are not combined
  // yet.
  struct Step {
    std::uint8_t sources;
    std::uint8_t folds;
  };
  static constexpr std::size_t kMaxDepth = 16;

  // Of one to kMaxSources sources. `leaves`: of each the first leaf below its node, ascending, less
  // than 2^(kMaxDepth - 1).
  static Tree over(std::span<const int> leaves);
  // Source k is leaf k.
  static const Tree& over_leaves(std::size_t sources);

  constexpr std::span<const Step> steps() const { return {steps_.data(), size_}; }

 private:
  constexpr explicit Tree(std::span<const int> leaves);

  std::array<Step, kMaxSources> steps_{};
  std::size_t size_ = 0;
};

}  // namespace paceline::shm
