#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "support/cases.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"

namespace paceline::test {

// Every backend with each of these numbers of ranks.
inline auto worlds(const std::vector<int>& sizes = {std::begin(kWorldSizes),
                                                    std::end(kWorldSizes)}) {
  std::vector<WorldCase> cases;
  for (const std::string& backend : backends()) {
    for (const int size : sizes) cases.push_back({backend, size});
  }
  return ::testing::ValuesIn(cases);
}

inline void expect_torch_ranks(const WorldCase& world,
                               const std::function<void(int rank, int size)>& body) {
  expect_torch_ranks(world.size, world.backend, body);
}

}  // namespace paceline::test
