#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <paceline/ddp.h>

#include "parallel/ddp/pair.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"
#include "trace/timeline.h"

namespace paceline {
namespace {

using at::Tensor;
using test::expect_torch_ranks;
using test::input_of;
using test::make_pair;

// Long enough for a sample at the end of a step to follow the one at its begin.
void compute() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST(RecordedThread, IsSampledAtTheBeginAndTheEndOfSteps) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    const test::TemporaryDirectory directory;
    trace::Timeline::start(directory.path(), rank, size);
    constexpr std::size_t kSteps = 3;
    {
      auto pair = make_pair({10}, {10}, [](auto& self, const Tensor& x) {
        compute();
        return x * self.v + self.w;
      });
      DistributedDataParallel model(pair);
      for (std::size_t step = 0; step < kSteps; ++step) {
        model(input_of(rank, 0, {10})).square().sum().backward();
      }
    }
    trace::Timeline::stop();
    std::ifstream file(directory.path() / ("rank" + std::to_string(rank) + ".json"));
    std::vector<double> samples;
    std::vector<double> begins;
    std::vector<double> ends;
    for (const auto& event : nlohmann::json::parse(file)) {
      if (event["name"] == "paceline_thread") samples.push_back(event["args"]["at"]);
      if (event["name"] != "step") continue;
      begins.push_back(event["ts"]);
      ends.push_back(begins.back() + event["dur"].get<double>());
    }
    ASSERT_EQ(begins.size(), kSteps);
    ASSERT_GT(samples.size(), kSteps);
    EXPECT_LE(samples.front(), begins.front());
    EXPECT_GE(samples.back(), ends.back());
  });
}

// By the first rank alone, as where only one writes a timeline.
TEST(Timelines, ContainWhatReductionsCost) {
  for (const std::string backend : {"paceline", "gloo"}) {
    expect_torch_ranks(2, backend, [](int rank, int size) {
      const test::TemporaryDirectory directory;
      if (rank == 0) trace::Timeline::start(directory.path(), rank, size);
      auto pair = make_pair({1000}, {1000}, [](auto& self, const Tensor& x) { return x * self.v; });
      DistributedDataParallel model(pair);
      if (rank != 0) return;
      trace::Timeline::stop();
      std::ifstream file(directory.path() / "rank0.json");
      int costs = 0;
      for (const auto& event : nlohmann::json::parse(file)) {
        if (event["name"] != "paceline_reduction") continue;
        EXPECT_GT(event["args"]["latency"].get<double>(), 0);
        EXPECT_GT(event["args"]["rate"].get<double>(), 0);
        ++costs;
      }
      EXPECT_EQ(costs, 1);
    });
  }
}

}  // namespace
}  // namespace paceline
