#include "collectives/streaming.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace paceline::bench {
namespace {

using Vectors = std::vector<std::vector<float>>;

template <std::size_t count>
void add_up(Vectors& vectors) {
  std::array<float*, count> data;
  for (std::size_t k = 0; k < count; ++k) data[k] = vectors[k].data();
  const std::size_t size = vectors[0].size();
  for (std::size_t i = 0; i < size; ++i) {
    float sum = data[0][i];
    for (std::size_t k = 1; k < count; ++k) sum += data[k][i];
    for (std::size_t k = 0; k < count; ++k) data[k][i] = sum;
  }
}

using Kernel = void (*)(Vectors&);

template <std::size_t... counts>
Kernel kernel_for(std::size_t ranks, std::index_sequence<counts...> /*all*/) {
  Kernel kernel = nullptr;
  ((counts + 1 == ranks ? kernel = add_up<counts + 1> : kernel), ...);
  return kernel;
}

}  // namespace

Contender streaming(int ranks, std::int64_t bytes) {
  const auto count = static_cast<std::size_t>(std::min(ranks, 8));
  const auto elements = static_cast<std::size_t>(bytes / 4 / ranks);
  auto vectors = std::make_shared<Vectors>(count, std::vector<float>(elements));
  const Kernel kernel = kernel_for(count, std::make_index_sequence<8>());
  return {.implementation = "streaming",
          .variant = "",
          .prepare =
              [vectors] {
                for (auto& one : *vectors) std::fill(one.begin(), one.end(), 1.0f);
              },
          .run = [vectors, kernel] { kernel(*vectors); }};
}

}  // namespace paceline::bench
