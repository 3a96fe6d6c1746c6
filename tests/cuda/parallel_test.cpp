// The other ways to train in parallel, on a CUDA device. Expected values come from one process.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include <paceline/data_parallel.h>
#include <paceline/ddp.h>
#include <paceline/join.h>
#include <paceline/pipeline.h>

#include "cuda/cuda_ranks.h"
#include "cuda/training.h"
#include "support/cases.h"
#include "support/small_net.h"

namespace paceline {
namespace {

using test::expect_cuda_ranks;

class CudaParallel : public test::CudaTest {};

constexpr int kWidth = 8;
constexpr int kMicrobatches = 4;

torch::nn::Sequential stage_of(int number, at::Device device) {
  torch::manual_seed(static_cast<std::uint64_t>(number) + 1);
  torch::nn::Sequential stage(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
  stage->to(device, at::kDouble);
  return stage;
}

at::Tensor squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
}

TEST_F(CudaParallel, PipelineTrainsLikeOneProcess) {
  for (const auto& [backend, size] :
       std::vector<test::WorldCase>{{"paceline", 2}, {"paceline", 3}, {"nccl", 2}}) {
    expect_cuda_ranks(size, backend, [](int rank, int stages, at::Device device) {
      torch::manual_seed(7);
      const auto input = torch::randn({12, kWidth}, at::kDouble).to(device);
      std::vector<torch::nn::Sequential> whole;
      for (int i = 0; i < stages; ++i) whole.push_back(stage_of(i, device));
      const auto stage = stage_of(rank, device);
      Pipeline pipeline(stage, squares, {.n_microbatches = kMicrobatches});
      torch::optim::SGD sgd(stage->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        for (auto& one : whole) one->zero_grad();
        for (const auto& part : input.chunk(kMicrobatches)) {
          auto x = part;
          for (auto& one : whole) x = one->forward(x);
          (squares(x, part.cos()) / kMicrobatches).backward();
        }
        sgd.zero_grad();
        pipeline.step(input, input.cos());
        auto& own = whole[static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < own->parameters().size(); ++i) {
          test::expect_close({stage->parameters()[i].grad().cpu()},
                             {own->parameters()[i].grad().cpu()}, 1e-12);
        }
        sgd.step();
        const torch::NoGradGuard no_grad;
        for (auto& one : whole) {
          for (const auto& parameter : one->parameters()) parameter.sub_(0.1 * parameter.grad());
        }
      }
    });
  }
}

TEST_F(CudaParallel, JoinTrainsOnUnevenInputs) {
  for (const char* const backend : {"paceline", "gloo", "nccl"}) {
    expect_cuda_ranks(3, backend, [](int rank, int size, at::Device device) {
      const auto steps_of = [](int r) { return 2 + 2 * r; };
      auto alone = test::make_net(at::kDouble);
      alone->to(device);
      torch::optim::SGD sgd_alone(alone->parameters(), test::kRate);
      for (int step = 0; step < steps_of(size - 1); ++step) {
        sgd_alone.zero_grad();
        for (int r = 0; r < size; ++r) {
          if (step >= steps_of(r)) continue;
          const auto x = test::batch_of(r, step, at::kDouble).to(device);
          (test::loss_of(alone(x), x) / size).backward();
        }
        sgd_alone.step();
      }
      auto net = test::make_net(at::kDouble);
      net->to(device);
      DistributedDataParallel model(net, {.bucket_cap_mb = test::kTinyBucket});
      torch::optim::SGD sgd(net->parameters(), test::kRate);
      join({model}, [&] {
        for (int step = 0; step < steps_of(rank); ++step) {
          sgd.zero_grad();
          const auto x = test::batch_of(rank, step, at::kDouble).to(device);
          test::loss_of(model(x), x).backward();
          sgd.step();
        }
      });
      test::expect_close(test::on_cpu(net->parameters()), test::on_cpu(alone->parameters()), 1e-12);
    });
  }
}

TEST_F(CudaParallel, DataParallelOnOneDeviceIsTheModule) {
  expect_cuda_ranks(1, "paceline", [](int, int, at::Device device) {
    torch::manual_seed(7);
    const auto input = torch::randn({12, kWidth}, at::kDouble);
    auto expected = stage_of(0, device);
    squares(expected->forward(input.to(device)), input.to(device)).backward();
    DataParallel<torch::nn::SequentialImpl> model([&] { return stage_of(0, device).ptr(); },
                                                  {.device_ids = {device}});
    const at::Tensor output = model(input);
    EXPECT_EQ(output.device(), device);
    squares(output, input.to(device)).backward();
    for (std::size_t i = 0; i < expected->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(model.parameters()[i].grad(), expected->parameters()[i].grad()));
    }
  });
}

}  // namespace
}  // namespace paceline
