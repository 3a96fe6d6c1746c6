#include "shm/kernels/tree.h"

#include <bit>
#include <utility>

namespace paceline::shm {

// The greater the highest bit in which two neighbours differ, the higher the node that combines
// them, and it has to wait for the nodes below its right side.
constexpr Tree::Tree(std::span<const int> leaves) {
  std::array<int, kMaxSources> waiting{};
  std::size_t number = 0;
  for (std::size_t k = 0; k < leaves.size(); ++k) {
    const bool last = k + 1 == leaves.size();
    const int next = last ? static_cast<int>(kMaxDepth)
                          : std::bit_width(static_cast<unsigned>(leaves[k] ^ leaves[k + 1]));
    Step step{1, 0};
    for (; number > 0 && waiting[number - 1] < next; --number) ++step.folds;
    waiting[number++] = next;
    // Two equal trees become one.
    while (step.folds > 0 && step.sources < 4 && steps_[size_ - 1].folds == 0 &&
           steps_[size_ - 1].sources == step.sources) {
      --size_;
      step.sources *= 2;
      --step.folds;
    }
    steps_[size_++] = step;
  }
}

Tree Tree::over(std::span<const int> leaves) {
  return Tree(leaves);
}

const Tree& Tree::over_leaves(std::size_t sources) {
  static constexpr auto kTrees = []<std::size_t... k>(std::index_sequence<k...>) {
    constexpr std::array<int, kMaxSources> leaves{k...};
    return std::array{Tree(std::span(leaves).first(k + 1))...};
  }
  (std::make_index_sequence<kMaxSources>());
  return kTrees[sources - 1];
}

}  // namespace paceline::shm
