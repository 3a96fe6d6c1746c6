// The collective calls and messages with CUDA tensors, over each backend.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <paceline/collectives.h>
#include <paceline/distributed.h>

#include "cuda/cuda_ranks.h"
#include "support/backends_table.h"
#include "support/cases.h"

namespace paceline {
namespace {

using test::expect_cuda_ranks;

class CudaCollectives : public test::CudaTest,
                        public ::testing::WithParamInterface<test::WorldCase> {};

at::Tensor values(int rank, at::Device device) {
  return at::arange(8, at::device(device).dtype(at::kFloat)) + rank;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.to(at::kCPU);
}

void expect_same(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(on_cpu(got), expected)) << got;
}

TEST_P(CudaCollectives, ReduceAndBroadcast) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const at::Tensor sum = values(rank, device);
    all_reduce(sum);
    expect_same(sum, values(0, at::kCPU) * size + size * (size - 1) / 2);

    const at::Tensor largest = values(rank, device);
    Work work = all_reduce_async(largest, {.op = ReduceOp::MAX});
    work.wait();
    expect_same(largest, values(size - 1, at::kCPU));

    const at::Tensor root = values(rank, device);
    broadcast(root, {.src = size - 1});
    expect_same(root, values(size - 1, at::kCPU));

    const at::Tensor strided = at::zeros({4, 4}, at::device(device)).select(1, 1);
    strided.fill_(rank);
    all_reduce(strided);
    expect_same(strided, at::full({4}, size * (size - 1) / 2, at::kFloat));

    const at::Tensor reduced = values(rank, device);
    reduce(reduced, {.dst = 0});
    if (rank == 0) expect_same(reduced, values(0, at::kCPU) * size + size * (size - 1) / 2);
    barrier();
  });
}

TEST_P(CudaCollectives, GatherAndScatter) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    std::vector<at::Tensor> all;
    for (int i = 0; i < size; ++i) all.push_back(at::zeros({8}, at::device(device)));
    all_gather(all, values(rank, device));
    for (int i = 0; i < size; ++i)
      expect_same(all[static_cast<std::size_t>(i)], values(i, at::kCPU));

    const at::Tensor flat = at::zeros({size * 8}, at::device(device));
    all_gather_into_tensor(flat, values(rank, device));
    for (int i = 0; i < size; ++i) expect_same(flat.narrow(0, i * 8, 8), values(i, at::kCPU));

    const at::Tensor part = at::zeros({8}, at::device(device));
    reduce_scatter_tensor(part, flat);
    expect_same(part, values(rank, at::kCPU) * size);

    const at::Tensor exchanged = at::zeros({size}, at::device(device));
    all_to_all_single(exchanged,
                      at::arange(size, at::device(device).dtype(at::kFloat)) + 10 * rank);
    expect_same(exchanged, at::arange(size, at::kFloat) * 10 + rank);
  });
}

TEST_P(CudaCollectives, Messages) {
  if (GetParam().size == 1) GTEST_SKIP() << "needs two ranks";
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const at::Tensor received = at::zeros({8}, at::device(device));
    Work sending = send_async(values(rank, device), (rank + 1) % size);
    recv(received, {.src = (rank + size - 1) % size});
    sending.wait();
    expect_same(received, values((rank + size - 1) % size, at::kCPU));
  });
}

std::vector<test::WorldCase> cuda_worlds() {
  std::vector<test::WorldCase> worlds;
  for (const int size : {1, 2, 4}) {
    for (const char* const backend : {"nccl", "paceline", "gloo"})
      worlds.push_back({backend, size});
  }
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(, CudaCollectives, ::testing::ValuesIn(cuda_worlds()), test::CaseName());

class CudaBackends : public test::CudaTest {};

TEST_F(CudaBackends, TheTableSaysWhatPacelineCan) {
  expect_cuda_ranks(2, "paceline", [](int rank, int, at::Device device) {
    test::expect_column("`paceline`, GPU", rank, device);
  });
}

TEST_F(CudaBackends, OneForEachTypeOfDevice) {
  expect_cuda_ranks(2, "cpu:gloo,cuda:nccl", [](int rank, int, at::Device device) {
    for (const at::Device on : {at::Device(at::kCPU), device}) {
      const at::Tensor sum = values(rank, on);
      all_reduce(sum);
      expect_same(sum, values(0, at::kCPU) * 2 + 1);
    }
  });
}

}  // namespace
}  // namespace paceline
