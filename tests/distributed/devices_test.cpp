// What concerns accelerators and needs none; tests/cuda has the rest.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/device.h>
#include <paceline/distributed.h>
#include <paceline/error.h>

#include "distributed/devices/cuda.h"
#include "distributed/devices/device_backends.h"
#include "distributed/devices/staged_backend.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using distributed::parse_backends;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(DeviceBackends, AreParsed) {
  const auto names = [](const std::string& text) {
    const auto backends = parse_backends(text);
    return backends.cpu + " " + backends.cuda;
  };
  EXPECT_EQ(names("paceline"), "paceline paceline");
  EXPECT_EQ(names("gloo"), "gloo gloo");
  EXPECT_EQ(names("nccl"), "paceline nccl");
  EXPECT_EQ(names("cpu:paceline,cuda:nccl"), "paceline nccl");
  EXPECT_EQ(names("cuda:nccl,cpu:gloo"), "gloo nccl");
  EXPECT_EQ(names("cuda:nccl"), "paceline nccl");
  EXPECT_EQ(names("cuda:gloo"), "gloo gloo");
  EXPECT_EQ(names("cpu:gloo"), "gloo gloo");
}

TEST(DeviceBackends, RefuseOtherTexts) {
  const auto refused = [](const char* text, const char* why) {
    EXPECT_THAT([&] { parse_backends(text); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr(text), HasSubstr(why), HasSubstr("cpu:paceline,cuda:nccl"))));
  };
  refused("cpu:gloo,nccl", "one of its parts has no device");
  refused("cpu:gloo,", "one of its parts has no device");
  refused("cpu:gloo,cpu:gloo", "a type of device twice");
  refused("cuda:", "a device without a backend");
  refused("xpu:xccl", "a device other than cpu and cuda");
  refused("cpu:nccl", "nccl is for CUDA tensors only");
  refused("cpu:paceline,cuda:gloo", "nccl, or the backend of CPU tensors");
}

TEST(DeviceBackends, NcclSaysWhyItIsNotThere) {
  if (distributed::Cuda::get().devices > 0) GTEST_SKIP() << "there is a CUDA device";
  std::string reason;
  EXPECT_FALSE(is_nccl_available(&reason));
  EXPECT_EQ(reason, distributed::Cuda::get().why_not);
  for (const char* const backend : {"nccl", "cpu:gloo,cuda:nccl"}) {
    const auto ends = test::run_torch_ranks(1, backend, [](const test::RankContext& context) {
      const World world = init_process_group(context.init);
      return std::string();
    });
    EXPECT_THAT(ends[0].report, AllOf(HasSubstr("the backend nccl is not available on rank 0: "),
                                      HasSubstr(reason)));
  }
}

TEST(LocalDevice, IsTheCpuWithoutCuda) {
  if (distributed::Cuda::get().devices > 0) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_EQ(local_device(), at::Device(at::kCPU));
  EXPECT_EQ(describe_local_device(), "the CPU: " + distributed::Cuda::get().why_not);
}

// The tensors are on the CPU; StagedBackend copies them like tensors on a device.
TEST(StagedBackend, PassesEveryCallOn) {
  test::expect_torch_ranks(2, "paceline", [](int rank, int size) {
    distributed::StagedBackend staged(ProcessGroup().c10d()->getBackend(c10::DeviceType::CPU));
    const auto mine = [&] { return at::full({2}, rank + 1.0); };
    const auto expect = [](const at::Tensor& got, std::vector<float> wanted) {
      EXPECT_TRUE(at::equal(got, at::tensor(wanted))) << got;
    };
    std::vector<at::Tensor> tensors{mine()};
    staged.allreduce(tensors, {})->wait();
    expect(tensors[0], {3, 3});
    const at::Tensor index = at::full({1, 1}, rank, at::kLong);
    tensors = {at::sparse_coo_tensor(index, at::ones({1}), {2}, at::kFloat)};
    staged.allreduce_sparse(tensors, {})->wait();
    expect(tensors[0].to_dense(), {1, 1});
    tensors = {mine()};
    staged.allreduce_coalesced(tensors, {})->wait();
    expect(tensors[0], {3, 3});
    tensors = {mine()};
    staged.broadcast(tensors, {.rootRank = 1})->wait();
    expect(tensors[0], {2, 2});
    tensors = {mine()};
    staged.reduce(tensors, {.rootRank = 0})->wait();
    if (rank == 0) expect(tensors[0], {3, 3});

    std::vector<at::Tensor> inputs{mine()};
    std::vector<std::vector<at::Tensor>> lists{{at::zeros({2}), at::zeros({2})}};
    staged.allgather(lists, inputs, {})->wait();
    expect(at::cat(lists[0]), {1, 1, 2, 2});
    at::Tensor all = at::zeros({4});
    at::Tensor own = mine();
    staged.all_gather_single(all, own, {})->wait();
    expect(all, {1, 1, 2, 2});
    std::vector<std::vector<at::Tensor>> gathered;
    if (rank == 0) gathered = {{at::zeros({2}), at::zeros({2})}};
    staged.gather(gathered, inputs, {.rootRank = 0})->wait();
    if (rank == 0) expect(at::cat(gathered[0]), {1, 1, 2, 2});
    std::vector<at::Tensor> outputs{at::zeros({2})};
    std::vector<std::vector<at::Tensor>> scattered;
    if (rank == 0) scattered = {{at::full({2}, 5.0), at::full({2}, 6.0)}};
    staged.scatter(outputs, scattered, {.rootRank = 0})->wait();
    expect(outputs[0], {5.0F + static_cast<float>(rank), 5.0F + static_cast<float>(rank)});
    std::vector<std::vector<at::Tensor>> parts{{mine(), mine() * 10}};
    staged.reduce_scatter(outputs, parts, {})->wait();
    expect(outputs[0], rank == 0 ? std::vector<float>{3, 3} : std::vector<float>{30, 30});
    at::Tensor part = at::zeros({2});
    at::Tensor whole = at::cat({mine(), mine() * 10});
    staged.reduce_scatter_single(part, whole, {})->wait();
    expect(part, rank == 0 ? std::vector<float>{3, 3} : std::vector<float>{30, 30});
    at::Tensor exchanged = at::zeros({4});
    std::vector<std::int64_t> even;
    staged.all_to_all_single(exchanged, whole, even, even, {})->wait();
    expect(exchanged,
           rank == 0 ? std::vector<float>{1, 1, 2, 2} : std::vector<float>{10, 10, 20, 20});
    std::vector<at::Tensor> to{at::zeros({2}), at::zeros({2})};
    std::vector<at::Tensor> from{mine(), mine() * 10};
    staged.alltoall(to, from, {})->wait();
    expect(at::cat(to),
           rank == 0 ? std::vector<float>{1, 1, 2, 2} : std::vector<float>{10, 10, 20, 20});

    std::vector<at::Tensor> message{mine()};
    std::vector<at::Tensor> answer{at::zeros({2})};
    const auto sent = staged.send(message, 1 - rank, 7);
    staged.recv(answer, 1 - rank, 7)->wait();
    sent->wait();
    expect(answer[0], {2.0F - static_cast<float>(rank), 2.0F - static_cast<float>(rank)});
    const auto again = staged.send(message, 1 - rank, 8);
    const auto received = staged.recvAnysource(answer, 8);
    received->wait();
    again->wait();
    EXPECT_EQ(received->sourceRank(), 1 - rank);

    tensors = {mine()};
    const auto future = staged.allreduce(tensors, {.asyncOp = true})->getFuture();
    future->wait();
    expect(future->value().toTensorVector()[0], {3, 3});
    staged.barrier({})->wait();
    EXPECT_EQ(staged.getSize(), size);
  });
}

// A time limit of Gloo's own would close the connections.
TEST(StagedBackend, AMessageGoesOnAfterATimeLimit) {
  for (const std::string& backend : test::backends()) {
    test::expect_torch_ranks(2, backend, [](int rank, int) {
      distributed::StagedBackend staged(ProcessGroup().c10d()->getBackend(c10::DeviceType::CPU));
      std::vector<at::Tensor> tensors{at::full({2}, rank + 1.0)};
      if (rank == 0) {
        const auto work = staged.recv(tensors, 1, 0);
        EXPECT_ANY_THROW(work->wait(std::chrono::milliseconds(20)));
        barrier();
        work->wait();
        EXPECT_EQ(tensors[0][0].item<float>(), 2);
      } else {
        barrier();
        staged.send(tensors, 0, 0)->wait();
      }
    });
  }
}

}  // namespace
}  // namespace paceline
