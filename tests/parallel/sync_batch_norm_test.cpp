#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <numeric>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/sync_batch_norm.h>

#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::int64_t kChannels = 3;

// Samples per rank differ; with more than two ranks the second has none.
std::int64_t batch_size(int rank, int size) {
  return size > 2 && rank == 1 ? 0 : 2 + rank;
}

torch::Tensor input_of(int rank, int size, int dimensions, int step, at::ScalarType type) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank));
  std::vector<std::int64_t> shape{batch_size(rank, size), kChannels};
  for (int d = 0; d < dimensions; ++d) shape.push_back(4 + d);
  // Far from zero, so that cancellation would show.
  return (torch::randn(shape, at::kDouble) + 50).to(type);
}

torch::Tensor whole_input(int size, int dimensions, int step, at::ScalarType type) {
  std::vector<torch::Tensor> parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(input_of(rank, size, dimensions, step, type));
  }
  return torch::cat(parts);
}

// This rank's part of a tensor over the whole batch.
torch::Tensor part_of(const torch::Tensor& whole, int rank, int size) {
  std::int64_t begin = 0;
  for (int before = 0; before < rank; ++before) begin += batch_size(before, size);
  return whole.narrow(0, begin, batch_size(rank, size));
}

torch::Tensor loss_weights(const torch::Tensor& like) {
  return torch::arange(like.numel(), like.options()).view(like.sizes()).cos();
}

void expect_close(const torch::Tensor& got, const torch::Tensor& expected, double tolerance) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(torch::allclose(got.to(at::kDouble), expected.to(at::kDouble), tolerance, tolerance))
      << got << expected;
}

template <typename Norm, typename Reference>
void compare(Norm norm, Reference reference, int rank, int size, int dimensions,
             at::ScalarType type, double tolerance) {
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < 3; ++step) {
    auto whole = whole_input(size, dimensions, step, at::kDouble).requires_grad_();
    auto mine = input_of(rank, size, dimensions, step, type).requires_grad_();
    torch::Tensor expected;
    torch::Tensor got;
    {
      const torch::AutoGradMode grad(true);
      expected = reference(whole);
      got = norm(mine);
      (expected * loss_weights(expected.detach())).sum().backward();
      (got * part_of(loss_weights(expected.detach()), rank, size).to(type)).sum().backward();
    }
    expect_close(got, part_of(expected, rank, size), tolerance);
    expect_close(mine.grad(), part_of(whole.grad(), rank, size), tolerance);
    EXPECT_EQ(got.scalar_type(), type);
  }
  for (std::size_t i = 0; i < reference->parameters().size(); ++i) {
    auto sum = norm->parameters()[i].grad().to(at::kDouble);
    all_reduce(sum);
    expect_close(sum, reference->parameters()[i].grad(), tolerance);
  }
  for (std::size_t i = 0; i < reference->buffers().size(); ++i) {
    expect_close(norm->buffers()[i], reference->buffers()[i], tolerance);
  }
  norm->eval();
  reference->eval();
  const auto x = input_of(0, 2, dimensions, 9, type);
  expect_close(norm(x), reference(x.to(at::kDouble)), tolerance);
}

using SyncBatchNormWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, SyncBatchNormWorlds, test::worlds(), test::CaseName());

TEST_P(SyncBatchNormWorlds, IsBatchNormOfTheWholeBatch) {
  const std::string& backend = GetParam().backend;
  const int size = GetParam().size;
  expect_torch_ranks(size, backend, [](int rank, int n) {
    const auto check = [&](int dimensions, auto reference, SyncBatchNormOptions options) {
      reference->to(torch::kDouble);
      SyncBatchNorm norm(options);
      norm->to(torch::kDouble);
      compare(norm, reference, rank, n, dimensions, at::kDouble, 1e-9);
    };
    using torch::nn::BatchNormOptions;
    check(0, torch::nn::BatchNorm1d(kChannels), {kChannels});
    check(1, torch::nn::BatchNorm1d(BatchNormOptions(kChannels).momentum(std::nullopt)),
          {.num_features = kChannels, .momentum = std::nullopt});
    check(2, torch::nn::BatchNorm2d(BatchNormOptions(kChannels).eps(0.1).momentum(0.3)),
          {.num_features = kChannels, .eps = 0.1, .momentum = 0.3});
    check(2, torch::nn::BatchNorm2d(BatchNormOptions(kChannels).track_running_stats(false)),
          {.num_features = kChannels, .track_running_stats = false});
    check(3, torch::nn::BatchNorm3d(BatchNormOptions(kChannels).affine(false)),
          {.num_features = kChannels, .affine = false});
  });
}

// Of doubles whose sum depends on the order.
TEST(SyncBatchNorm, AddsInTheOrderOfTheTree) {
  constexpr int kRanks = 5;
  const std::vector<double> means{1.1, 1e8, -2.3e8, 0.7e-3, 1.3e8};
  std::vector<double> shares;
  for (const double mean : means) shares.push_back(mean * (1.0 / kRanks));
  const double tree = ((shares[0] + shares[1]) + (shares[2] + shares[3])) + shares[4];
  ASSERT_NE(tree, std::accumulate(shares.begin(), shares.end(), 0.0));
  for (const auto& backend : backends()) {
    expect_torch_ranks(kRanks, backend, [&](int rank, int) {
      SyncBatchNorm norm(SyncBatchNormOptions{.num_features = 1, .momentum = 1});
      norm->to(at::kDouble);
      norm(torch::full({1, 1}, means[static_cast<std::size_t>(rank)], at::kDouble));
      EXPECT_EQ(norm->named_buffers()["running_mean"].item<double>(), tree);
    });
  }
}

TEST(SyncBatchNorm, SupportsFloatAndHalfTypes) {
  expect_torch_ranks(3, "paceline", [](int rank, int n) {
    for (const auto& [type, tolerance] : {std::pair(at::kFloat, 2e-4), {at::kBFloat16, 0.3}}) {
      torch::nn::BatchNorm2d reference(kChannels);
      reference->to(torch::kDouble);
      SyncBatchNorm norm(kChannels);
      compare(norm, reference, rank, n, 2, type, tolerance);
    }
  });
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(2);
    conv = register_module("conv", torch::nn::Conv2d(kChannels, 4, 3));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    flat = register_module("flat", torch::nn::BatchNorm1d(4));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return flat(torch::relu(norm(conv(x))).mean({2, 3}));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::BatchNorm1d flat{nullptr};
};
TORCH_MODULE(Net);

using ConvertSyncBatchNormBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, ConvertSyncBatchNormBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(ConvertSyncBatchNormBackends, TrainsAsOneProcessWithTheWholeBatch) {
  const std::string& backend = GetParam();
  expect_torch_ranks(2, backend, [](int rank, int n) {
    DistributedDataParallel model(convert_sync_batchnorm(Net()));
    Net plain;
    torch::optim::SGD sgd(model.parameters(), 0.1);
    torch::optim::SGD plain_sgd(plain->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      const auto whole = whole_input(n, 2, step, at::kDouble);
      const auto mine = input_of(rank, n, 2, step, at::kDouble);
      sgd.zero_grad();
      const auto cubes = model(mine).pow(3).sum();
      (cubes * n / static_cast<double>(whole.size(0) * 4)).backward();
      sgd.step();
      plain_sgd.zero_grad();
      plain(whole).pow(3).mean().backward();
      plain_sgd.step();
    }
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      expect_close(model.parameters()[i], plain->parameters()[i], 1e-7);
    }
    for (std::size_t i = 0; i < plain->buffers().size(); ++i) {
      expect_close(model.module()->buffers()[i], plain->buffers()[i], 1e-7);
    }
  });
}

TEST(ConvertSyncBatchNorm, RejectsAverageOverSamples) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto refused = ThrowsMessage<UsageError>(HasSubstr("divided by the same number"));
    const DdpOptions options{.average = Average::samples};
    EXPECT_THAT([&] { DistributedDataParallel(convert_sync_batchnorm(Net()), options); }, refused);
    EXPECT_THAT([&] { DistributedDataParallel(SyncBatchNorm(3), options); }, refused);
    const DistributedDataParallel model(Net(), options);
  });
}

TEST(ConvertSyncBatchNorm, LeavesOtherModulesAndEvaluationUnchanged) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    torch::nn::BatchNorm1d converted(kChannels);
    convert_sync_batchnorm(*converted);
    converted->eval();
    const auto x = input_of(rank, n, 0, 1, at::kFloat);
    torch::nn::BatchNorm1d plain(kChannels);
    expect_close(converted(x), (plain->eval(), plain(x)), 1e-6);
    if (rank == 0) {  // not collective
      plain->train();
      plain(x);
      torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(kChannels).affine(false))->forward(x);
    }
    torch::nn::Sequential bare(torch::nn::BatchNorm1d(
        torch::nn::BatchNormOptions(kChannels).affine(false).track_running_stats(false)));
    EXPECT_THAT([&] { convert_sync_batchnorm(*bare); },
                ThrowsMessage<UsageError>(HasSubstr("0 has no running statistics")));
    converted->train();
    const auto whole = whole_input(n, 0, 1, at::kFloat);
    torch::nn::BatchNorm1d reference(kChannels);
    expect_close(converted(x), part_of(reference(whole), rank, n), 1e-3);
  });
}

// Statistics of many batches may be collected without gradients. Inference mode excludes autograd's
// kernels.
TEST(ConvertSyncBatchNorm, NormalizesTheWholeBatchInInferenceMode) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    torch::nn::BatchNorm2d converted(kChannels);
    torch::nn::BatchNorm2d reference(kChannels);
    converted->to(at::kDouble);
    reference->to(at::kDouble);
    convert_sync_batchnorm(*converted);
    const c10::InferenceMode inference;
    const auto expected = reference(whole_input(n, 2, 0, at::kDouble));
    expect_close(converted(input_of(rank, n, 2, 0, at::kDouble)), part_of(expected, rank, n), 1e-9);
    for (std::size_t i = 0; i < reference->buffers().size(); ++i) {
      expect_close(converted->buffers()[i], reference->buffers()[i], 1e-9);
    }
    converted->eval();
    reference->eval();
    const auto x = input_of(rank, n, 2, 1, at::kDouble);
    expect_close(converted(x), reference(x), 1e-9);
  });
}

// A module that trains a TorchScript module: it runs it and registers its tensors.
struct ScriptedImpl : torch::nn::Module {
  ScriptedImpl() {
    norm.register_buffer("running_mean", torch::zeros({kChannels}));
    norm.define(R"(
      def forward(self, x):
          return torch.batch_norm(x, None, None, self.running_mean, None, True, 0.1, 1e-5, False)
    )");
    for (const auto& buffer : norm.named_buffers()) {
      register_buffer("norm_" + buffer.name, buffer.value);
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return norm.forward({x}).toTensor(); }
  torch::jit::Module norm{"Norm"};
};
TORCH_MODULE(Scripted);

TEST(ConvertSyncBatchNorm, RejectsOtherModulesWithRunningStatistics) {
  torch::nn::BatchNorm1d converted(kChannels);
  const torch::nn::Sequential net(converted, Scripted());
  EXPECT_THAT([&] { convert_sync_batchnorm(net); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("convert_sync_batchnorm: 1 has a buffer norm_running_mean"),
                        HasSubstr("TorchScript"))));
  const torch::nn::InstanceNorm1dOptions tracking =
      torch::nn::InstanceNorm1dOptions(kChannels).track_running_stats(true);
  convert_sync_batchnorm(torch::nn::Sequential(
      torch::nn::BatchNorm1d(kChannels), torch::nn::InstanceNorm1d(tracking), SyncBatchNorm(3)));
}

TEST(SyncBatchNorm, RejectsInputsThatItCannotNormalize) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    EXPECT_THROW(SyncBatchNorm(0), UsageError);
    SyncBatchNorm norm(kChannels);
    EXPECT_THROW(norm(torch::ones({2, 4})), UsageError);
    EXPECT_THROW(norm(torch::ones({3})), UsageError);
    EXPECT_THROW(norm(torch::ones({2, 3}, torch::kInt)), UsageError);
    for (const int total : {0, 1}) {
      EXPECT_THAT(
          [&] {
            norm(torch::ones({total * rank, kChannels}));
          },
          ThrowsMessage<UsageError>(
              HasSubstr("needs at least 2 values for each channel on all ranks together, but got " +
                        std::to_string(total))));
    }
  });
}

}  // namespace
}  // namespace paceline
