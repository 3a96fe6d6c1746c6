// Memory on CUDA devices, and of the host for them.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <csignal>
#include <cstdint>
#include <string>

#include <paceline/data_loader.h>
#include <paceline/ddp.h>
#include <paceline/sampler.h>
#include <paceline/tensor_dataset.h>

#include "base/deadline.h"
#include "cuda/cuda_ranks.h"

namespace paceline {
namespace {

using test::expect_cuda_ranks;

class CudaMemory : public test::CudaTest {};

std::int64_t allocated(at::Device device) {
  return c10::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
      .current;
}

TEST_F(CudaMemory, AModelCostsItsBucketsAndLeavesNothing) {
  expect_cuda_ranks(2, "paceline", [](int, int, at::Device device) {
    const auto x = at::ones({4, 1024}, at::device(device));
    const auto train = [&] {
      torch::nn::Sequential net(torch::nn::Linear(1024, 1024), torch::nn::Linear(1024, 1024));
      net->to(device);
      const std::int64_t before = allocated(device);
      std::int64_t bytes = 0;
      for (const auto& parameter : net->parameters()) {
        bytes += static_cast<std::int64_t>(parameter.nbytes());
      }
      DistributedDataParallel model(net);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(x).sum().backward();
      }
      EXPECT_LE(allocated(device) - before, bytes * 11 / 10);
    };
    train();  // also what cuBLAS keeps
    const std::int64_t before = allocated(device);
    train();
    EXPECT_EQ(allocated(device), before);
  });
}

TEST_F(CudaMemory, BatchesArePinned) {
  expect_cuda_ranks(1, "paceline", [](int, int, at::Device device) {
    const data::TensorDataset set(at::arange(12, at::kFloat).view({12, 1}), at::arange(12));
    for (const int workers : {0, 2}) {
      data::DataLoader loader(set, data::SequentialSampler(set.size()),
                              {.batch_size = 4, .num_workers = workers, .pin_memory = true});
      double sum = 0;
      for (auto& [x, y] : loader.epoch(0)) {
        EXPECT_TRUE(x.is_pinned() && y.is_pinned());
        sum += x.to(device, /*non_blocking=*/true).sum().template item<double>();
      }
      EXPECT_EQ(sum, 66);
    }
  });
}

// It is in each batch, and the data set's own.
TEST_F(CudaMemory, ATensorThatIsInEachBatchIsNotPinnedItself) {
  expect_cuda_ranks(1, "paceline", [](int, int, at::Device) {
    const at::Tensor mask = at::ones({3});
    const data::TensorDataset set(at::arange(12, at::kFloat).view({12, 1}));
    data::DataLoader loader(
        set, data::SequentialSampler(set.size()),
        {.batch_size = 2, .num_workers = 2, .pin_memory = true},
        [&](const auto& samples) { return std::pair(data::DefaultCollate()(samples), mask); });
    for (auto& [batch, ones] : loader.epoch(0)) {
      EXPECT_TRUE(ones.is_pinned());
      EXPECT_TRUE(ones.equal(mask));
    }
    EXPECT_FALSE(mask.is_pinned());
  });
}

// What all processes use of the device, in bytes, as a new process sees it.
std::int64_t used_by_all() {
  const auto ends = test::run_process_ranks(1, [](int, const shm::BootstrapSockets&) {
    const at::Device device = local_device();
    const auto [free, total] =
        c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    return std::to_string(total - free);
  });
  return std::stoll(ends[0].report);
}

TEST_F(CudaMemory, KilledRanksLeaveNothing) {
  const std::int64_t before = used_by_all();
  const auto ends = test::run_torch_ranks(2, "paceline", [](const test::RankContext& context) {
    const at::Device device = local_device();
    const World world = init_process_group(context.init);
    torch::nn::Linear net(4096, 4096);
    net->to(device);
    DistributedDataParallel model(net);
    const auto ballast = at::ones({256, 1024, 1024}, at::device(device));  // 1 GiB
    for (;;) {
      model(at::ones({8, 4096}, at::device(device))).sum().backward();
      if (net->weight.grad().sum().item<float>() > 0) ::raise(SIGKILL);
    }
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.killed()) << end.report;
  const auto deadline = base::Deadline::after(std::chrono::seconds(30));
  constexpr std::int64_t kNoise = std::int64_t{64} << 20;
  std::int64_t after = used_by_all();
  while (after > before + kNoise && !deadline.expired()) after = used_by_all();
  EXPECT_LE(after, before + kNoise);
}

}  // namespace
}  // namespace paceline
