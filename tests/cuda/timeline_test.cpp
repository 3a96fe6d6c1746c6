// The times of a CUDA device in timelines.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <paceline/ddp.h>

#include "cuda/cuda_ranks.h"
#include "support/cases.h"
#include "support/temporary_directory.h"
#include "trace/timeline.h"

namespace paceline {
namespace {

class CudaTimeline : public test::CudaTest, public ::testing::WithParamInterface<std::string> {};

INSTANTIATE_TEST_SUITE_P(, CudaTimeline, ::testing::Values("paceline", "nccl"), test::CaseName());

// The hooks of a backward end long before the device does.
TEST_P(CudaTimeline, HasTheTimesOfTheDevice) {
  const test::TemporaryDirectory directory;
  const auto ends = test::run_torch_ranks(2, GetParam(), [&](const test::RankContext& context) {
    ::setenv("PACELINE_TIMELINE", directory.path().c_str(), 1);
    const at::Device device = test::shared_device();
    const World world = init_process_group(context.init);
    torch::nn::Sequential net;
    for (int layer = 0; layer < 4; ++layer) net->push_back(torch::nn::Linear(2048, 2048));
    net->to(device);
    DistributedDataParallel model(net, {.bucket_cap_mb = 1});
    const auto x = at::ones({16384, 2048}, at::device(device));
    for (int step = 0; step < 10; ++step) {
      net->zero_grad();
      model(x).sum().backward();
    }
    torch::cuda::synchronize();
    model(x).sum().backward();  // takes the times of the steps before
    trace::Timeline::stop();
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;

  std::map<std::pair<std::string, int>, std::vector<std::pair<double, double>>> spans;  // by step
  for (const auto& event : nlohmann::json::parse(std::ifstream(directory.path() / "rank0.json"))) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"];
    const double length = event["dur"];
    spans[{event["name"], event["args"]["step"]}].emplace_back(begin, begin + length);
  }
  for (int step = 3; step < 9; ++step) {
    const auto at = [&](const char* kind) { return spans[{kind, step}]; };
    ASSERT_EQ(at("device_forward").size(), 1U) << step;
    ASSERT_EQ(at("device_backward").size(), 1U) << step;
    ASSERT_EQ(at("device_bucket").size(), at("bucket").size()) << step;
    ASSERT_GT(at("bucket").size(), 1U) << step;
    const auto [forward_begin, forward_end] = at("device_forward")[0];
    const auto [backward_begin, backward_end] = at("device_backward")[0];
    EXPECT_GT(forward_end, at("forward")[0].second);
    EXPECT_NEAR(backward_begin, forward_end, 1);
    // Four products of 137 GFLOP, and seven.
    EXPECT_GT(forward_end - forward_begin, 500);
    EXPECT_GT(backward_end - backward_begin, 1.5 * (forward_end - forward_begin));
    for (const auto& [begin, end] : at("device_bucket")) {
      EXPECT_GT(begin, backward_begin);
      EXPECT_LT(begin, backward_end + 1);
      EXPECT_GT(end, begin);
    }
  }
}

}  // namespace
}  // namespace paceline
