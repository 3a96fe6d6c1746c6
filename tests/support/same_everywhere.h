#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "support/thoroughness.h"
#include "support/torch_ranks.h"

namespace paceline::test {

inline at::Generator cpu_generator() {
  return at::globalContext().defaultGenerator(at::kCPU);
}

// Runs `body` on each of these numbers of ranks over shared memory, on some of them (with more
// thoroughness on all) over Gloo and across nodes too, and expects the same result from every rank.
inline void expect_same_everywhere(const std::vector<int>& sizes,
                                   const std::function<std::string()>& body) {
  std::set<std::string> results;
  std::vector<std::string> all = backends();
  if (is_gloo_available()) all.emplace_back(kAcrossNodes);
  for (const int size : sizes) {
    for (const std::string& backend : all) {
      const bool is_some = thoroughness() > 1 || size == 2 || size == 5 ||
                           (size == sizes.back() && backend == "gloo");
      if (backend != "paceline" && !is_some) continue;
      const auto ends = run_torch_ranks(size, backend, [&](const RankContext& context) {
        const auto world = init_process_group(context.init);
        return body();
      });
      for (const auto& end : ends) {
        EXPECT_TRUE(end.exited_cleanly()) << end.report;
        results.insert(end.report);
        EXPECT_EQ(results.size(), 1u) << size << " ranks over " << backend;
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace paceline::test
