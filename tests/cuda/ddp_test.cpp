// DistributedDataParallel on CUDA devices. Expected values come from a single process without it.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <c10/core/Event.h>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <paceline/autocast.h>
#include <paceline/collectives.h>
#include <paceline/comm_hooks.h>
#include <paceline/ddp.h>
#include <paceline/grad_scaler.h>
#include <paceline/power_sgd.h>
#include <paceline/sync_batch_norm.h>

#include "cuda/cuda_ranks.h"
#include "cuda/training.h"
#include "distributed/devices/device_bucket_reducer.h"
#include "distributed/devices/streams.h"
#include "support/cases.h"
#include "support/small_net.h"

namespace paceline {
namespace {

using test::batch_of;
using test::bytes_of;
using test::expect_cuda_ranks;
using test::kRate;
using test::kSteps;
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using test::Net;
using test::on_cpu;
using test::trained;
using test::trained_alone;

class CudaDdp : public test::CudaTest, public ::testing::WithParamInterface<test::WorldCase> {};

TEST_P(CudaDdp, EqualsOneProcessOnTheWholeBatch) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const auto expected = trained_alone(size, device);
    for (const auto& options : std::vector<DdpOptions>{
             {},
             {.device_ids = {device}, .output_device = device, .bucket_cap_mb = kTinyBucket},
             {.find_unused_parameters = true},
             {.gradient_as_bucket_view = false},
             {.bucket_cap_mb = kTinyBucket, .static_graph = true}}) {
      test::expect_close(trained(options, rank, device), expected, 1e-12);
    }
    test::expect_close(trained({.bucket_cap_mb = kTinyBucket}, rank, device, 3),
                       trained_alone(size, device, 3), 1e-12);
  });
}

TEST_P(CudaDdp, AllRanksHaveTheSameBits) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int, at::Device device) {
    const auto all =
        all_gather_bytes(bytes_of(trained({.bucket_cap_mb = kTinyBucket}, rank, device)));
    for (const auto& bytes : all) EXPECT_EQ(bytes, all[0]);
  });
}

TEST_P(CudaDdp, WeighsBySamples) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    auto weight = at::zeros({3}, at::device(device).dtype(at::kDouble));
    torch::nn::Linear net(torch::nn::LinearOptions(3, 1).bias(false));
    net->to(device, at::kDouble);
    DistributedDataParallel model(net, {.average = Average::samples});
    double total = 0;
    for (int r = 0; r < size; ++r) {
      total += r + 1;
      weight += (r + 1.0) * at::full({3}, r + 2.0, weight.options());
    }
    model.set_samples(rank + 1);
    model(at::full({1, 3}, rank + 2.0, weight.options())).sum().backward();
    test::expect_close({net->weight.grad().view({3})}, {weight / total}, 1e-12);
  });
}

struct BranchedImpl : torch::nn::Module {
  torch::nn::Linear used{register_module("used", torch::nn::Linear(4, 4))};
  torch::nn::Linear unused{register_module("unused", torch::nn::Linear(4, 4))};
  torch::Tensor forward(const torch::Tensor& x, bool both) {
    return both ? used(x) + unused(x) : used(x);
  }
};
TORCH_MODULE(Branched);

TEST_P(CudaDdp, UnusedParameters) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    torch::manual_seed(1);
    Branched net;
    net->to(device);
    DistributedDataParallel model(net, {.find_unused_parameters = true});
    const auto x = at::ones({2, 4}, at::device(device));
    for (int step = 0; step < 3; ++step) {
      model(x, rank == 0).sum().backward();
      EXPECT_TRUE(
          at::allclose(net->unused->bias.grad().cpu(), at::full({4}, 2.0 * (step + 1) / size)));
    }
    net->zero_grad();
    model(x, false).sum().backward();
    EXPECT_FALSE(net->unused->bias.grad().defined());
  });
}

// In buckets of one parameter each.
TEST_P(CudaDdp, BucketsOfUnusedParametersAreSkipped) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    torch::manual_seed(1);
    Branched net;
    net->to(device);
    DistributedDataParallel model(net, {.bucket_cap_mb = 0.00001,
                                        .find_unused_parameters = true,
                                        .skip_all_reduce_unused_params = true});
    const auto x = at::full({2, 4}, rank + 1.0, at::device(device));
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      if (step == 2) net->unused->bias.mutable_grad() = at::full({4}, rank, x.options());
      model(x, step % 2 == 1).sum().backward();
      EXPECT_TRUE(at::allclose(net->used->weight.grad().cpu(), at::full({4, 4}, size + 1.0)));
    }
    net->zero_grad();
    net->unused->bias.mutable_grad() = at::full({4}, rank, x.options());
    model(x, false).sum().backward();
    EXPECT_TRUE(at::equal(net->unused->bias.grad().cpu(), at::full({4}, rank, at::kFloat)));
  });
}

TEST_P(CudaDdp, SparseGradientsStaySparse) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    const auto table_on = [](at::Device on) {
      torch::manual_seed(8);
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(20, 3).sparse(true));
      table->to(on, at::kDouble);
      return table;
    };
    const auto words = [](int r, at::Device on) { return torch::tensor({r, 7}).to(on); };
    auto expected = table_on(at::kCPU);
    for (int r = 0; r < size; ++r) {
      (expected(words(r, at::kCPU)).pow(2).sum() / size).backward();
    }
    for (const int logical_ranks : {0, size}) {
      auto table = table_on(device);
      DistributedDataParallel model(table, {.logical_ranks = logical_ranks});
      const auto look_up = [&] { model(words(rank, device)).pow(2).sum().backward(); };
      if (logical_ranks == 0) look_up();
      if (logical_ranks > 0) {
        for (const int logical : model.logical_ranks()) {
          EXPECT_EQ(logical, rank);
          look_up();
        }
      }
      const at::Tensor gradient = table->weight.grad();
      ASSERT_TRUE(gradient.is_sparse());
      EXPECT_EQ(gradient.device(), device);
      test::expect_close({gradient.cpu().to_dense()}, {expected->weight.grad().to_dense()}, 1e-12);
    }
  });
}

TEST_P(CudaDdp, HooksGiveWhatTheyGiveOnTheCpu) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int, at::Device device) {
    const auto gradients = [&](at::Device on, int which) {
      Net net = make_net(at::kFloat);
      net->to(on);
      DistributedDataParallel model(net, {.bucket_cap_mb = kTinyBucket});
      if (which == 0) model.register_comm_hook(comm_hooks::all_reduce());
      if (which == 1) model.register_comm_hook(comm_hooks::bf16_compress());
      if (which == 2)
        model.register_comm_hook(
            comm_hooks::power_sgd(comm_hooks::PowerSgdState({.start_power_sgd_iter = 2})));
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        const auto x = batch_of(rank, step, at::kFloat).to(on);
        loss_of(model(x), x).backward();
      }
      std::vector<torch::Tensor> result;
      for (const auto& parameter : net->parameters()) result.push_back(parameter.grad());
      return on_cpu(result);
    };
    for (const int which : {0, 1, 2}) {
      test::expect_close(gradients(device, which), gradients(at::kCPU, which),
                         which == 1 ? 2e-2 : 1e-3);
    }
  });
}

TEST_P(CudaDdp, SyncBatchNormSeesTheWholeBatch) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    std::vector<torch::Tensor> parts;
    for (int r = 0; r < size; ++r) {
      torch::manual_seed(static_cast<std::uint64_t>(r));
      const bool empty = size > 2 && r == 1;
      parts.push_back(torch::randn({empty ? 0 : 3 + r, 5, 4, 4}, at::kDouble) + 2);
    }
    torch::nn::BatchNorm2d expected(5);
    expected->to(at::kDouble);
    auto whole = torch::cat(parts).requires_grad_();
    expected(whole).pow(3).sum().backward();
    std::int64_t first = 0;
    for (int r = 0; r < rank; ++r) first += parts[static_cast<std::size_t>(r)].size(0);

    const auto check = [&](auto norm) {
      norm->to(device, at::kDouble);
      auto input = parts[static_cast<std::size_t>(rank)].to(device).requires_grad_();
      norm->forward(input).pow(3).sum().backward();
      const auto gradient = whole.grad().narrow(0, first, input.size(0));
      EXPECT_TRUE(at::allclose(input.grad().cpu(), gradient, 1e-8, 1e-8));
      all_reduce(norm->weight.mutable_grad());
      test::expect_close(on_cpu({norm->weight.grad(), norm->running_mean, norm->running_var}),
                         {expected->weight.grad(), expected->running_mean, expected->running_var},
                         1e-8);
    };
    check(SyncBatchNorm(5));
    torch::nn::BatchNorm2d converted(5);
    convert_sync_batchnorm(*converted);
    check(converted);
  });
}

// More values than float16 can count.
TEST_P(CudaDdp, SyncBatchNormCountsBeyondSixteenBits) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    std::vector<torch::Tensor> parts;
    for (int r = 0; r < size; ++r) {
      torch::manual_seed(static_cast<std::uint64_t>(r));
      parts.push_back((torch::randn({2, 3, 192, 192}) + r).to(at::kHalf));
    }
    torch::nn::BatchNorm2d expected(3);
    const at::Tensor whole = expected(torch::cat(parts).to(at::kFloat));
    SyncBatchNorm norm(3);
    norm->to(device, at::kHalf);
    const at::Tensor output = norm(parts[static_cast<std::size_t>(rank)].to(device));
    std::vector<torch::Tensor> found;
    for (const auto& one : {output, norm->running_mean, norm->running_var}) {
      found.push_back(one.to(at::kCPU, at::kFloat));
    }
    test::expect_close(
        found, {whole.narrow(0, 2 * rank, 2), expected->running_mean, expected->running_var}, 1e-2);
  });
}

TEST_P(CudaDdp, AStepThatThrowsIsForgottenByAll) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int size, at::Device device) {
    Net net = make_net(at::kDouble);
    net->to(device);
    DistributedDataParallel model(net, {.bucket_cap_mb = kTinyBucket});
    bool fails = rank == 0;
    net->second->weight.register_hook([&](const torch::Tensor& gradient) {
      if (fails) throw std::runtime_error("the program's own");
      return gradient;
    });
    const auto x = batch_of(rank, 0, at::kDouble).to(device);
    EXPECT_ANY_THROW({
      loss_of(model(x), x).backward();
      net->zero_grad();
      loss_of(model(x), x);  // at the latest here, rank 0's exception is known
    });
    fails = false;
    net->zero_grad();
    loss_of(model(x), x).backward();
    const auto expected = test::whole_batch_gradients(0, size);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      test::expect_close({net->parameters()[i].grad().cpu()}, {expected[i].grad()}, 1e-12);
    }
  });
}

TEST_P(CudaDdp, InputsAreCopiedToTheDeviceOfDeviceIds) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int, at::Device device) {
    Net net = make_net(at::kDouble);
    net->to(device);
    DistributedDataParallel model(net, {.device_ids = {device}});
    EXPECT_EQ(model(batch_of(rank, 0, at::kDouble)).device(), device);
  });
}

TEST_P(CudaDdp, GradScalerLeavesOutTheSameStepOnAllRanks) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int, at::Device device) {
    Net net = make_net(at::kFloat);
    net->to(device);
    DistributedDataParallel model(net);
    torch::optim::SGD sgd(net->parameters(), kRate);
    GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
    std::vector<bool> stepped;
    for (int step = 0; step < 4; ++step) {
      sgd.zero_grad();
      const auto x = batch_of(rank, step, at::kFloat).to(device);
      torch::Tensor output;
      {
        const autocast guard(at::kCUDA, {.dtype = at::kHalf});
        output = model(x);
      }
      auto loss = loss_of(output.to(at::kFloat), x);
      if (rank == 0 && step == 1) loss = loss * std::numeric_limits<float>::infinity();
      scaler.scale(loss).backward();
      stepped.push_back(scaler.step(sgd));
      scaler.update();
    }
    EXPECT_EQ(stepped, (std::vector<bool>{true, false, true, true}));
    EXPECT_EQ(scaler.get_scale(), 1024);  // halved, then doubled after two steps
    const auto all = all_gather_bytes(bytes_of(on_cpu(net->parameters())));
    for (const auto& bytes : all) EXPECT_EQ(bytes, all[0]);
  });
}

TEST_P(CudaDdp, AutocastTrains) {
  expect_cuda_ranks(GetParam().size, GetParam().backend, [](int rank, int, at::Device device) {
    Net net = make_net(at::kFloat);
    net->to(device);
    DistributedDataParallel model(net);
    const auto x = batch_of(rank, 0, at::kFloat).to(device);
    torch::Tensor output;
    {
      const autocast guard(at::kCUDA, {.dtype = at::kBFloat16});
      output = model(x);
    }
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    loss_of(output.to(at::kFloat), x).backward();
    EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
  });
}

std::vector<test::WorldCase> ddp_worlds() {
  // Over NCCL, more than two ranks that share a device take long.
  std::vector<test::WorldCase> worlds{{"nccl", 1}, {"nccl", 2}, {"nccl", 3}, {"paceline", 1}};
  for (const int size : {2, 3, 4}) {
    for (const char* const backend : {"paceline", "gloo"}) worlds.push_back({backend, size});
  }
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(, CudaDdp, ::testing::ValuesIn(ddp_worlds()), test::CaseName());

class CudaLogicalRanks : public test::CudaTest {};

constexpr int kLogicalRanks = 8;

std::vector<torch::Tensor> trained_by_logical_ranks(at::Device device, at::ScalarType type,
                                                    double dropout, Average average) {
  Net net = make_net(type);
  net->to(device);
  torch::manual_seed(11);
  DistributedDataParallel model(
      net, {.bucket_cap_mb = kTinyBucket, .average = average, .logical_ranks = kLogicalRanks});
  torch::optim::SGD sgd(net->parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    for (const int rank : model.logical_ranks()) {
      if (average == Average::samples) model.set_samples(rank + 1);
      const auto x = batch_of(rank, step, type).to(device);
      loss_of(model(torch::dropout(x, dropout, true)), x).backward();
    }
    sgd.step();
  }
  return on_cpu(net->parameters());
}

TEST_F(CudaLogicalRanks, GiveTheSameBitsOnAnyNumberOfRanks) {
  const std::vector<test::WorldCase> worlds{{"nccl", 1},     {"nccl", 3},     {"paceline", 1},
                                            {"paceline", 2}, {"paceline", 3}, {"paceline", 4},
                                            {"gloo", 3}};
  std::set<std::string> bits;
  for (const auto& [backend, size] : worlds) {
    const auto ends = test::run_torch_ranks(size, backend, [](const test::RankContext& context) {
      const at::Device device = test::shared_device();
      const World world = init_process_group(context.init);
      test::expect_close(trained_by_logical_ranks(device, at::kDouble, 0, Average::ranks),
                         trained_alone(kLogicalRanks, device), 1e-12);
      std::string bytes;
      for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
        for (const auto average : {Average::ranks, Average::samples}) {
          bytes += bytes_of(trained_by_logical_ranks(device, type, 0.25, average));
        }
      }
      return fmt::format("{:016x}", std::hash<std::string>()(bytes));
    });
    for (const auto& end : ends) {
      EXPECT_TRUE(end.exited_cleanly()) << size << " ranks on " << backend << ": " << end.report;
      bits.insert(end.report);
    }
  }
  EXPECT_EQ(bits.size(), 1U);
  EXPECT_EQ(bits.begin()->size(), 16U) << *bits.begin();
}

TEST_F(CudaLogicalRanks, KeepTheirRandomNumbersIfAStateIsTheCpus) {
  expect_cuda_ranks(1, "paceline", [](int, int, at::Device device) {
    Net net = make_net(at::kFloat);
    net->to(device);
    DistributedDataParallel model(net, {.logical_ranks = 2});
    auto logical = model.logical_ranks();
    const auto cpu_bytes = at::globalContext().defaultGenerator(at::kCPU).get_state().numel();
    const auto own = logical.state(1);
    ASSERT_GT(own.random.numel(), cpu_bytes);
    auto of_cpu = logical.state(0);
    of_cpu.random = of_cpu.random.narrow(0, 0, cpu_bytes);
    logical.set_state(1, of_cpu);
    const auto begin = logical.state(1).random.narrow(0, 0, cpu_bytes);
    EXPECT_TRUE(at::equal(begin, of_cpu.random));
    const auto rest = [&](const at::Tensor& all) {
      return all.narrow(0, cpu_bytes, all.numel() - cpu_bytes);
    };
    EXPECT_TRUE(at::equal(rest(logical.state(1).random), rest(own.random)));
  });
}

class CudaNccl : public test::CudaTest {};

// The reducer of several ranks, in a world of one, where DistributedDataParallel needs none.
TEST_F(CudaNccl, TheReducerDoesNotWaitForTheDevice) {
  expect_cuda_ranks(1, "nccl", [](int, int, at::Device device) {
    using distributed::BucketReducer;
    const auto op = BucketReducer::Op::average;
    const c10::Stream backward = distributed::current_stream(device);
    std::vector<std::size_t> averaged;
    distributed::DeviceBucketReducer reducer(
        ProcessGroup().c10d(), device.type(),
        {.buckets = {{1000, at::kFloat, device, op}, {10, at::kDouble, device, op}},
         .describe = [](std::size_t) { return std::string("a test's"); },
         .averaged =
             [&](std::size_t bucket, const c10::Stream& stream) {
               EXPECT_NE(stream, backward);
               averaged.push_back(bucket);
             }});
    const at::Tensor matrix = at::ones({8192, 8192}, at::device(device));
    for (int step = 0; step < 3; ++step) {
      at::Tensor product = matrix;
      for (int i = 0; i < 20; ++i) product = at::mm(product, matrix).div_(8192);
      reducer.begin_step({}, {}, {});
      reducer.tensor(0).copy_(product.view({-1}).narrow(0, 0, 1000));
      reducer.tensor(1).fill_(step);
      reducer.publish(1);
      reducer.publish(0);
      reducer.finish();
      c10::Event end(device.type());
      end.record(distributed::current_stream(device));
      EXPECT_TRUE(step == 0 || !end.query()) << "the device had ended before the call did";
      EXPECT_TRUE(at::equal(reducer.tensor(0).cpu(), at::ones({1000})));
      EXPECT_TRUE(at::equal(reducer.tensor(1).cpu(), at::full({10}, step, at::kDouble)));
    }
    EXPECT_THAT(averaged, ::testing::ElementsAre(0, 1, 0, 1, 0, 1));
  });
}

TEST_F(CudaNccl, OneRankHasTheBitsOfNoWrapper) {
  expect_cuda_ranks(1, "nccl", [](int rank, int, at::Device device) {
    EXPECT_EQ(bytes_of(trained({}, rank, device)), bytes_of(trained_alone(1, device)));
  });
}

}  // namespace
}  // namespace paceline
