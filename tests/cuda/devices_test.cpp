// Which devices ranks use, with a real driver.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <fmt/format.h>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include <paceline/collectives.h>
#include <paceline/device.h>
#include <paceline/distributed.h>
#include <paceline/record.h>
#include <paceline/spawn.h>

#include "cuda/cuda_ranks.h"

namespace paceline {
namespace {

using test::expect_cuda_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class CudaDevices : public test::CudaTest {};

TEST_F(CudaDevices, RanksShareThemIfThereAreFewer) {
  expect_cuda_ranks(3, "paceline", [](int rank, int, at::Device device) {
    const int devices = static_cast<int>(torch::cuda::device_count());
    EXPECT_EQ(device.index(), rank % devices);
    EXPECT_THAT(describe_local_device(),
                StartsWith(fmt::format("cuda:{}: local rank {} of 3, and this process sees {} CUDA "
                                       "device",
                                       rank % devices, rank, devices)));
    if (devices < 3) {
      EXPECT_THAT(describe_local_device(), HasSubstr("ranks may share devices"));
    }
    EXPECT_EQ(at::zeros({1}, at::kCUDA).device(), device);
  });
}

TEST_F(CudaDevices, AreThoseThatTheVariableNames) {
  const auto described = [](const std::string& visible) {
    return test::run_torch_ranks(1, "paceline",
                                 [&](const test::RankContext&) {
                                   ::setenv("CUDA_VISIBLE_DEVICES", visible.c_str(), 1);
                                   return local_device().str() + "; " + describe_local_device();
                                 })[0]
        .report;
  };
  EXPECT_THAT(described("0"), StartsWith("cuda:0; cuda:0: local rank 0 of 1, and this process sees "
                                         "1 CUDA device"));
  for (const std::string none : {"", "77"}) {
    EXPECT_THAT(described(none),
                AllOf(StartsWith("cpu; the CPU: "),
                      HasSubstr("finds no device with CUDA_VISIBLE_DEVICES=" + none)));
  }
}

TEST_F(CudaDevices, NcclRefusesRanksThatShareOne) {
  const auto ends = test::run_torch_ranks(2, "nccl", [](const test::RankContext& context) {
    ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    static_cast<void>(local_device());
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice({at::kCUDA, 0});
    const World world = init_process_group(context.init);
    return std::string();
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("ranks 0 and 1 have the same current CUDA device"),
                                  HasSubstr("NCCL_MULTI_RANK_GPU_ENABLE=1")));
  }
}

TEST_F(CudaDevices, AreNotFoundIfLibTorchWasAskedFirst) {
  const auto ends = test::run_torch_ranks(1, "paceline", [](const test::RankContext&) {
    torch::manual_seed(1);
    return describe_local_device();
  });
  EXPECT_THAT(ends[0].report, HasSubstr("call paceline::local_device before"));
}

// Runs in a program of its own, which spawned processes start anew.
TEST_F(CudaDevices, DISABLED_InSpawnedProcesses) {
  EXPECT_EQ(at::ones({2}, at::device(test::shared_device())).sum().item<float>(), 2);
  const int status = record([] {
    spawn(
        [](int rank) {
          const at::Device device = local_device();
          const World world = init_process_group({.backend = "nccl"});
          const at::Tensor sum = at::full({2}, rank + 1.0F, at::device(device));
          all_reduce(sum);
          if (sum.sum().item<float>() != 6) throw std::runtime_error("a wrong sum");
        },
        {.nprocs = 2});
    return 0;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(CudaDevices, AreUsedInSpawnedProcesses) {
  const std::string program = std::filesystem::canonical("/proc/self/exe");
  EXPECT_EQ(std::system((program + " --gtest_brief=1 --gtest_also_run_disabled_tests "
                                   "--gtest_filter=CudaDevices.DISABLED_InSpawnedProcesses")
                            .c_str()),
            0);
}

}  // namespace
}  // namespace paceline
