#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "support/cases.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"

namespace paceline::test {

// Every backend with each of these numbers of ranks, and one of them across nodes.
inline auto worlds(const std::vector<int>& sizes = {std::begin(kWorldSizes),
                                                    std::end(kWorldSizes)}) {
  std::vector<WorldCase> cases;
  if (const auto world = launched_world())
    return ::testing::ValuesIn(std::vector<WorldCase>{*world});
  for (const std::string& backend : backends()) {
    for (const int size : sizes) cases.push_back({backend, size});
  }
  // Neither too few for nodes of several ranks, nor so many that it takes long.
  const auto several = std::ranges::find_if(sizes, [](int size) { return size >= 3; });
  if (is_gloo_available()) {
    cases.push_back({kAcrossNodes, several == sizes.end() ? sizes.back() : *several});
  }
  return ::testing::ValuesIn(cases);
}

// The backend paceline with each of these numbers of ranks; or those that were launched.
inline auto own_worlds(const std::vector<int>& sizes = {std::begin(kWorldSizes),
                                                        std::end(kWorldSizes)}) {
  std::vector<WorldCase> cases;
  for (const int size : sizes) cases.push_back({"paceline", size});
  if (const auto world = launched_world()) cases = {*world};
  return ::testing::ValuesIn(cases);
}

// Every backend, and paceline across nodes: for tests of two ranks.
inline auto backends_and_nodes() {
  std::vector<std::string> all = backends();
  if (is_gloo_available()) all.emplace_back(kAcrossNodes);
  return ::testing::ValuesIn(all);
}

inline void expect_torch_ranks(const WorldCase& world,
                               const std::function<void(int rank, int size)>& body) {
  expect_torch_ranks(world.size, world.backend, body);
}

}  // namespace paceline::test
