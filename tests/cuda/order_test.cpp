// Calls whose tensors the device has yet to compute, and objects that end before it has.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <c10/core/StreamGuard.h>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "cuda/cuda_ranks.h"
#include "cuda/training.h"
#include "distributed/devices/streams.h"
#include "support/cases.h"

namespace paceline {
namespace {

using test::batch_of;
using test::expect_cuda_ranks;
using test::loss_of;

class CudaOrder : public test::CudaTest, public ::testing::WithParamInterface<test::WorldCase> {};

INSTANTIATE_TEST_SUITE_P(, CudaOrder,
                         ::testing::Values(test::WorldCase{"nccl", 2},
                                           test::WorldCase{"paceline", 2},
                                           test::WorldCase{"paceline", 3},
                                           test::WorldCase{"gloo", 2}),
                         test::CaseName());

// Puts tens of milliseconds of work into the current stream.
void keep_busy(at::Device device) {
  at::Tensor product = at::ones({4096, 4096}, at::device(device));
  for (int i = 0; i < 16; ++i) product = at::mm(product, product).div_(4096);
}

// As trained(), with a device that is late everywhere.
std::vector<torch::Tensor> trained_by_a_busy_device(int rank, at::Device device) {
  test::Net net = test::make_net(at::kDouble);
  net->to(device);
  DistributedDataParallel model(net, {.bucket_cap_mb = test::kTinyBucket});
  net->first->weight.register_hook([&](const at::Tensor& /*gradient*/) { keep_busy(device); });
  torch::optim::SGD sgd(net->parameters(), test::kRate);
  for (int step = 0; step < test::kSteps; ++step) {
    sgd.zero_grad(/*set_to_none=*/step % 2 == 0);
    const auto x = batch_of(rank, step, at::kDouble).to(device);
    keep_busy(device);
    loss_of(model(x), x).backward();
    sgd.step();
  }
  return test::on_cpu(net->parameters());
}

TEST_P(CudaOrder, GradientsAreAveragedOnceTheyAreComputed) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const auto expected = test::trained_alone(size, device);
    test::expect_close(trained_by_a_busy_device(rank, device), expected, 1e-12);
    const c10::StreamGuard guard(distributed::new_stream(device));
    test::expect_close(trained_by_a_busy_device(rank, device), expected, 1e-12);
  });
}

TEST_P(CudaOrder, GradientsOutliveTheModel) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    test::Net net = test::make_net(at::kDouble);
    net->to(device);
    const auto x = batch_of(rank, 0, at::kDouble).to(device);
    {
      DistributedDataParallel model(net, {.bucket_cap_mb = test::kTinyBucket});
      keep_busy(device);
      loss_of(model(x), x).backward();
    }
    // In the memory that the model has freed, if it has.
    for (int i = 0; i < 8; ++i) at::full({40, 33}, 17.0, x.options());
    const auto expected = test::whole_batch_gradients(0, size);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      test::expect_close({net->parameters()[i].grad().cpu()}, {expected[i].grad()}, 1e-12);
    }
  });
}

// On the stream for which the tensors were allocated, and on another.
TEST_P(CudaOrder, AModelMayEndBeforeAnotherStreamHasTrainedIt) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const auto x = batch_of(rank, 0, at::kDouble).to(device);
    std::vector<at::Tensor> gradients;
    const c10::Stream aside = distributed::new_stream(device);
    {
      test::Net net = test::make_net(at::kDouble);
      net->to(device);
      DistributedDataParallel model(net, {.bucket_cap_mb = test::kTinyBucket});
      const c10::StreamGuard guard(aside);
      keep_busy(device);
      loss_of(model(x), x).backward();
      for (const auto& parameter : net->parameters()) {
        gradients.push_back(parameter.grad().clone());
      }
    }
    for (int i = 0; i < 8; ++i) at::full({40, 33}, 17.0, x.options());
    aside.synchronize();
    const auto expected = test::whole_batch_gradients(0, size);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      test::expect_close({gradients[i].cpu()}, {expected[i].grad()}, 1e-12);
    }
  });
}

TEST_P(CudaOrder, TensorsMayBeFreedBeforeACallHasRun) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const auto options = at::device(device).dtype(at::kFloat);
    const at::Tensor kept = at::full({1 << 20}, rank, options);
    Work work;
    keep_busy(device);
    for (int i = 0; i < 4; ++i) {
      const at::Tensor freed = at::full({1 << 20}, rank + i, options);
      static_cast<void>(all_reduce_async(freed));
      if (i == 2) work = all_reduce_async(kept);
    }
    // In their memory, if it is free.
    std::vector<at::Tensor> later;
    for (int i = 0; i < 4; ++i) later.push_back(at::full({1 << 20}, -1, options));
    work.wait();
    for (const at::Tensor& tensor : later) {
      EXPECT_TRUE(at::equal(tensor.cpu(), at::full({1 << 20}, -1, at::kFloat)));
    }
    EXPECT_TRUE(at::equal(kept.cpu(), at::full({1 << 20}, size * (size - 1) / 2, at::kFloat)));
  });
}

TEST_P(CudaOrder, AWorldMayEndBeforeItsCallsHaveRun) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int, at::Device device) {
    const at::Tensor tensor = at::full({1 << 20}, rank, at::device(device));
    keep_busy(device);
    static_cast<void>(all_reduce_async(tensor));
  });
}

}  // namespace
}  // namespace paceline
