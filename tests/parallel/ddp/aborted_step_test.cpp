#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/ddp.h>
#include <paceline/error.h>

#include "parallel/ddp/pair.h"
#include "support/cases.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"
#include "trace/timeline.h"

namespace paceline {
namespace {

using test::averaged_gradients;
using test::expect_gradients;
using test::expect_torch_ranks;
using test::input_of;
using test::make_pair;
using test::Pair;
using test::PairImpl;
using test::squared_norm;
using test::throw_on_rank_1;
using ::testing::HasSubstr;
using torch::Tensor;

// Runs a step whose backward throws on rank 1, after the gradient of w has arrived.
void abort_step(DistributedDataParallel<PairImpl>& model, const Tensor& x, int rank) {
  const Tensor& v = model.module()->v;
  const unsigned hook = throw_on_rank_1(v, rank);
  EXPECT_ANY_THROW(squared_norm(model(x)).backward());
  v.remove_hook(hook);
}

using AbortedStepBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, AbortedStepBackends, test::backends_and_nodes(), test::CaseName());

// Nothing of the aborted step is left, on any rank, wherever gradients are stored.
TEST_P(AbortedStepBackends, NextForwardSetsGradientsToZero) {
  const std::vector<DdpOptions> all{
      {.bucket_cap_mb = 0.00001},
      {.gradient_as_bucket_view = false},
      {.bucket_cap_mb = 0.00001, .gradient_as_bucket_view = false, .zero_copy = false},
      {.find_unused_parameters = true, .skip_all_reduce_unused_params = true}};
  for (const DdpOptions& options : all) {
    expect_torch_ranks(2, GetParam(), [&](int rank, int size) {
      Pair pair = make_pair(
          {20000}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v.sum() + self.w; });
      const Tensor x = input_of(rank, 0, {20000});
      const auto averages = averaged_gradients(pair, x, size);
      DistributedDataParallel model(pair, options);
      squared_norm(model(x)).backward();
      pair->zero_grad();
      abort_step(model, x, rank);
      squared_norm(model(x)).backward();  // with no zero_grad
      expect_gradients(pair, averages, "after an aborted step");
    });
  }
}

// That w was used in it counts no longer, on the one rank that came so far.
TEST_P(AbortedStepBackends, ForgetsItsUsedParameters) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    bool both = true;
    Pair pair = make_pair({10}, {10}, [&](PairImpl& self, const Tensor& x) {
      return both ? x * self.v + self.w : x * self.v;
    });
    DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001,
                                         .find_unused_parameters = true,
                                         .skip_all_reduce_unused_params = true});
    const Tensor x = input_of(rank, 0, {10});
    squared_norm(model(x)).backward();
    abort_step(model, x, rank);
    pair->zero_grad();
    both = false;
    squared_norm(model(x)).backward();
    EXPECT_FALSE(pair->w.grad().defined());
  });
}

// On the heap, in MiB.
std::size_t used_memory() {
  const auto use = ::mallinfo2();
  return (use.uordblks + use.hblkhd) >> 20;
}

// Other nodes may have sent, or wait for, what the rank that throws never starts.
TEST_P(AbortedStepBackends, LeavesNoMemoryBehind) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    constexpr std::int64_t kCount = 1 << 20;
    Pair pair = make_pair({kCount}, {kCount},
                          [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
    DistributedDataParallel model(pair);
    const Tensor x = input_of(rank, 0, {kCount});
    std::size_t before = 0;
    for (int step = 0; step < 120; ++step) {
      abort_step(model, x, rank);
      if (step == 9) before = used_memory();
    }
    EXPECT_LT(used_memory(), before + 100);
  });
}

// If its node never gets as far as the other, which waits for messages and then starts no more.
TEST_P(AbortedStepBackends, LeavesNoThreadsBehind) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    Pair pair =
        make_pair({10}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
    DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001});
    const Tensor x = input_of(rank, 0, {10});
    for (int step = 0; step < 500; ++step) abort_step(model, x, rank);
    const std::filesystem::directory_iterator threads("/proc/self/task");
    EXPECT_LT(std::distance(begin(threads), end(threads)), 60);
    squared_norm(model(x)).backward();
  });
}

// Buckets are made anew after the first step.
TEST(AbortedStep, IsReportedWithItsNumber) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    Pair pair =
        make_pair({10}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
    DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001});
    const Tensor x = input_of(rank, 0, {10});
    for (int step = 1; step <= 3; ++step) squared_norm(model(x)).backward();
    throw_on_rank_1(pair->v, rank);
    try {
      squared_norm(model(x)).backward();
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_EQ(error.sequence(), 4U);
      EXPECT_THAT(error.what(), HasSubstr("step 4"));
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(rank, 1) << error.what();
    }
    model(x);  // so that rank 1 stays until rank 0 has been told
  });
}

// What the timeline shows of the next step begins with its own forward.
TEST(AbortedStep, DoesNotCountInTheNextStepsTime) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    const test::TemporaryDirectory directory;
    trace::Timeline::start(directory.path(), rank, size);
    {
      Pair pair = make_pair({10}, {10},
                            [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
      DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001});
      const Tensor x = input_of(rank, 0, {10});
      for (int step = 0; step < 2; ++step) squared_norm(model(x)).backward();
      abort_step(model, x, rank);
      squared_norm(model(x)).backward();
    }
    trace::Timeline::stop();
    std::ifstream file(directory.path() / fmt::format("rank{}.json", rank));
    std::map<std::string, double> begin;  // of the last of a kind
    for (const auto& event : nlohmann::json::parse(file)) {
      if (event["ph"] == "X") begin[event["cat"]] = event["ts"];
    }
    EXPECT_EQ(begin.at("step"), begin.at("forward"));
  });
}

}  // namespace
}  // namespace paceline
