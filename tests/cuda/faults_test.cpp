// Ranks that are lost, stop or differ, and forked children, where CUDA is in use.

#include <gmock/gmock.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fmt/format.h>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/comm_hooks.h>
#include <paceline/ddp.h>

#include "cuda/cuda_ranks.h"
#include "support/cases.h"
#include "support/small_net.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::batch_of;
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Model = DistributedDataParallel<test::NetImpl>;

constexpr int kFaultyRank = 1;
constexpr int kFaultyStep = 4;  // counted from 0

// Trains on three ranks until an error. `prepare` runs before training, `fault` on one rank before
// one of its steps. The reports are the errors' texts.
std::vector<test::RankEnd> train_until_an_error(const std::string& backend,
                                                std::chrono::milliseconds timeout,
                                                const std::function<void(Model&)>& fault,
                                                const std::function<void(Model&)>& prepare = {}) {
  return test::run_torch_ranks(3, backend, [&](const test::RankContext& context) {
    const at::Device device = test::shared_device();
    InitOptions init = context.init;
    init.timeout = timeout;
    const World world = init_process_group(init);
    const auto pids = all_gather_bytes(std::to_string(::getpid()));
    auto net = make_net(at::kDouble);
    net->to(device);
    Model model(net.ptr(), {.bucket_cap_mb = kTinyBucket});
    if (prepare) prepare(model);
    auto begin = std::chrono::steady_clock::now();
    std::string text = "no error";
    try {
      for (int step = 0; step < 100; ++step) {
        if (context.rank == kFaultyRank && step == kFaultyStep) fault(model);
        begin = std::chrono::steady_clock::now();
        const auto x = batch_of(context.rank, step, at::kDouble).to(device);
        loss_of(model(x), x).backward();
      }
    } catch (const Error& error) {
      text = error.what();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::fprintf(stderr, "%s, rank %d, %.3f s: %s\n", backend.c_str(), context.rank, took.count(),
                 text.c_str());
    if (context.rank == 0) ::kill(std::stoi(pids[kFaultyRank]), SIGCONT);
    return text;
  });
}

// Of the ranks that are not at fault.
void expect_reports_of_others(const std::vector<test::RankEnd>& ends,
                              const ::testing::Matcher<std::string>& matcher) {
  for (const std::size_t rank : {0, 2}) EXPECT_THAT(ends[rank].report, matcher) << "rank " << rank;
}

constexpr auto kLong = 60s;

class CudaFaults : public test::CudaTest {};

TEST_F(CudaFaults, AForkedChildIsRefused) {
  const auto ends = test::run_torch_ranks(1, "paceline", [](const test::RankContext& context) {
    at::zeros({1}, at::device(local_device()));
    return test::run_process_ranks(1,
                                   [&](int, shm::BootstrapSockets) {
                                     const World world = init_process_group(context.init);
                                     return std::string();
                                   })[0]
        .report;
  });
  EXPECT_THAT(ends[0].report, HasSubstr("had initialized CUDA"));
}

// The sum is undefined, and the next call says why.
TEST_F(CudaFaults, ACallOverNcclEndsIfARankIsLost) {
  const auto ends = test::run_torch_ranks(3, "nccl", [](const test::RankContext& context) {
    const at::Device device = test::shared_device();
    const World world = init_process_group(context.init);
    const at::Tensor tensor = at::ones({1 << 20}, at::device(device));
    all_reduce(tensor);
    EXPECT_EQ(tensor.cpu()[0].item<float>(), 3);
    if (context.rank == 1) ::raise(SIGKILL);
    try {
      for (;;) {
        all_reduce(tensor);
        tensor.cpu();
      }
    } catch (const PeerLost& error) {
      return std::string(error.what());
    }
    return std::string();
  });
  expect_reports_of_others(ends, HasSubstr("rank 1 was lost"));
}

TEST_F(CudaFaults, ARankThatIsLostBeforeNcclsFirstCallIsNamed) {
  const auto ends = test::run_torch_ranks(3, "nccl", [](const test::RankContext& context) {
    const at::Device device = test::shared_device();
    const World world = init_process_group(context.init);
    barrier();
    if (context.rank == 1) ::raise(SIGKILL);
    try {
      barrier();
    } catch (const PeerLost&) {
    }
    try {
      all_reduce(at::ones({1}, at::device(device)));
    } catch (const PeerLost& error) {
      return std::string(error.what());
    }
    return std::string();
  });
  expect_reports_of_others(ends, HasSubstr("rank 1 was lost"));
}

// Rank 0 leaves while rank 2 waits for its device, as rank 1 is lost.
TEST_F(CudaFaults, AWorldOverNcclEndsThoughARankIsLost) {
  const auto ends = test::run_torch_ranks(3, "nccl", [](const test::RankContext& context) {
    const at::Device device = test::shared_device();
    const World world = init_process_group(context.init);
    const at::Tensor tensor = at::ones({1 << 20}, at::device(device));
    all_reduce(tensor);
    tensor.cpu();
    if (context.rank == 1) ::raise(SIGKILL);
    static_cast<void>(all_reduce_async(tensor));
    if (context.rank == 2) tensor.cpu();
    return std::string("left");
  });
  EXPECT_EQ(ends[0].report, "left");
  EXPECT_THAT(ends[2].report, ::testing::AnyOf("left", HasSubstr("rank 1 was lost")));
}

class CudaFaultyRanks : public test::CudaTest, public ::testing::WithParamInterface<std::string> {};

INSTANTIATE_TEST_SUITE_P(, CudaFaultyRanks, ::testing::Values("paceline", "nccl"),
                         test::CaseName());

TEST_P(CudaFaultyRanks, AKilledRankIsNamedByTheOthers) {
  const auto ends = train_until_an_error(GetParam(), kLong, [](const Model&) { ::raise(SIGKILL); });
  EXPECT_TRUE(ends[kFaultyRank].killed());
  expect_reports_of_others(ends, AllOf(HasSubstr("rank 1 was lost"),
                                       HasSubstr("step 5 of group world, bucket 0 (last.bias, ")));
}

TEST_P(CudaFaultyRanks, ARankKilledBetweenBucketsIsNamedByTheOthers) {
  const auto ends = train_until_an_error(GetParam(), kLong, [](Model& model) {
    model.module()->first->weight.register_hook([](const at::Tensor&) { ::raise(SIGKILL); });
  });
  EXPECT_TRUE(ends[kFaultyRank].killed());
  expect_reports_of_others(
      ends, AllOf(HasSubstr("rank 1 was lost"), HasSubstr("step 5 of group world, bucket ")));
}

TEST_P(CudaFaultyRanks, AKilledRankIsNamedWhereHooksReduce) {
  const auto ends = train_until_an_error(
      GetParam(), kLong, [](const Model&) { ::raise(SIGKILL); },
      [](Model& model) { model.register_comm_hook(comm_hooks::all_reduce()); });
  expect_reports_of_others(ends, HasSubstr("rank 1 was lost"));
}

TEST_P(CudaFaultyRanks, AStoppedRankIsNamedByTheOthers) {
  const auto ends = train_until_an_error(GetParam(), 3s, [](const Model&) { ::raise(SIGSTOP); });
  for (const std::size_t rank : {0, 2}) EXPECT_TRUE(ends[rank].exited_cleanly());
  expect_reports_of_others(ends, AllOf(HasSubstr("rank 1"), HasSubstr("step 5 of group world"),
                                       HasSubstr("bucket 0 (last.bias, ")));
}

TEST_P(CudaFaultyRanks, ARankInAnotherCallIsNamed) {
  const auto ends = train_until_an_error(GetParam(), kLong, [](const Model&) { barrier(); });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("rank 1"), HasSubstr("barrier"),
                                  HasSubstr("step 5 of group world")));
  }
}

TEST_P(CudaFaultyRanks, AParameterFrozenOnOneRankIsNamed) {
  const auto ends = train_until_an_error(
      GetParam(), kLong, [](Model& model) { model.module()->second->bias.requires_grad_(false); });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly());
    EXPECT_THAT(end.report,
                AllOf(HasSubstr("step 5"), HasSubstr("second.bias is frozen on rank 1")));
  }
}

}  // namespace
}  // namespace paceline
