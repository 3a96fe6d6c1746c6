// Ranks that are lost, and forked children, where CUDA is in use.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <fmt/format.h>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>

#include <paceline/ddp.h>

#include "cuda/cuda_ranks.h"
#include "support/cases.h"
#include "support/small_net.h"

namespace paceline {
namespace {

using test::batch_of;
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using test::Net;
using ::testing::HasSubstr;

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

TEST_F(CudaFaults, AKilledRankIsNamedByTheOthers) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const test::RankContext& context) {
    const at::Device device = local_device();
    const World world = init_process_group(context.init);
    Net net = make_net(at::kDouble);
    net->to(device);
    DistributedDataParallel model(net, {.bucket_cap_mb = kTinyBucket});
    auto begin = std::chrono::steady_clock::now();
    try {
      for (int step = 0; step < 100; ++step) {
        if (context.rank == 1 && step == 5) ::raise(SIGKILL);
        begin = std::chrono::steady_clock::now();
        const auto x = batch_of(context.rank, step, at::kDouble).to(device);
        loss_of(model(x), x).backward();
      }
    } catch (const PeerLost& error) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      EXPECT_LT(took.count(), 30);
      return fmt::format("{:.3f} s: {}", took.count(), error.what());
    }
    return std::string("no error");
  });
  EXPECT_TRUE(ends[1].killed());
  for (const std::size_t rank : {0, 2}) {
    EXPECT_THAT(ends[rank].report, HasSubstr("rank 1 was lost"));
    EXPECT_THAT(ends[rank].report, HasSubstr("step 6 of group world, bucket 0 (last.bias, "));
    std::printf("rank %zu: %s\n", rank, ends[rank].report.c_str());
  }
}

}  // namespace
}  // namespace paceline
