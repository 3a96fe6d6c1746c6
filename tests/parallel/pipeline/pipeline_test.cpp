#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/device_mesh.h>
#include <paceline/pipeline.h>

#include "parallel/pipeline/stages.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::bytes_of;
using test::errors_of;
using test::expect_torch_ranks;
using test::Fork;
using test::input_of;
using test::Join;
using test::kSamples;
using test::kWidth;
using test::squares;
using test::stage_of;
using test::target_of;
using ::testing::Each;
using ::testing::Field;
using ::testing::HasSubstr;

// The whole model in one process.
class Oracle {
 public:
  explicit Oracle(int stages, at::ScalarType type = at::kFloat) {
    for (int i = 0; i < stages; ++i) stages_.push_back(stage_of(i, type));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& stage : stages_) x = stage->forward(x);
    return x;
  }
  // Adds up gradients over micro-batches; returns their mean loss.
  at::Tensor step(const at::Tensor& input, const at::Tensor& target, std::int64_t m) {
    at::Tensor sum;
    const auto inputs = input.chunk(m);
    const auto targets = target.chunk(m);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto loss = squares(forward(inputs[i]), targets[i]) / m;
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    return sum;
  }
  torch::nn::Sequential& stage(int i) { return stages_[static_cast<std::size_t>(i)]; }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& stage : stages_) {
      for (const auto& parameter : stage->parameters()) all.push_back(parameter);
    }
    return all;
  }

 private:
  std::vector<torch::nn::Sequential> stages_;
};

std::vector<at::Tensor> state_of(const torch::nn::Sequential& stage) {
  std::vector<at::Tensor> all = stage->buffers();
  for (const auto& parameter : stage->parameters()) {
    all.push_back(parameter);
    all.push_back(parameter.grad());
  }
  return all;
}

using PipelineWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, PipelineWorlds, test::worlds(), test::CaseName());

TEST_P(PipelineWorlds, TrainsWithTheBitsOfAccumulation) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
      for (const std::int64_t m : {1, 3, 6}) {
        SCOPED_TRACE(m);
        const auto stage = stage_of(rank);
        Pipeline pipeline(stage, squares, {.n_microbatches = m, .schedule = schedule});
        torch::optim::SGD sgd(stage->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        Oracle oracle(n);
        torch::optim::SGD expected(oracle.parameters(),
                                   torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          sgd.zero_grad();
          expected.zero_grad();
          const auto x = input_of(step).to(at::kFloat);
          const auto loss = pipeline.step(x, target_of(x));
          const auto expected_loss = oracle.step(x, target_of(x), m);
          if (rank == n - 1) {
            EXPECT_TRUE(loss.equal(expected_loss));
          } else {
            EXPECT_FALSE(loss.defined());
          }
          sgd.step();
          expected.step();
          EXPECT_EQ(bytes_of(state_of(stage)), bytes_of(state_of(oracle.stage(rank))));
        }
        const auto sent = static_cast<std::int64_t>(kSamples * kWidth * sizeof(float) * 3);
        const int neighbours = (rank > 0 ? 1 : 0) + (rank + 1 < n ? 1 : 0);
        EXPECT_EQ(pipeline.stats().bytes_sent, sent * neighbours);
        EXPECT_EQ(pipeline.stats().bytes_received, sent * neighbours);
        EXPECT_EQ(pipeline.stats().steps, 3u);
        EXPECT_EQ(pipeline.stats().last.size(), static_cast<std::size_t>(2 * m));
      }
    }
  });
}

TEST_P(PipelineWorlds, EvaluatesBatchesOfAnySize) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    auto stage = stage_of(rank);
    // Fails without samples.
    stage->push_back(torch::nn::Functional([](const at::Tensor& x) {
      return x.view({x.size(0), -1});
    }));
    stage->eval();
    Pipeline pipeline(stage, squares, {.n_microbatches = 4});
    Oracle oracle(n);
    for (int i = 0; i < n; ++i) oracle.stage(i)->eval();
    for (const int samples : {7, 3, 1}) {
      const auto x = input_of(0).to(at::kFloat).narrow(0, 0, samples);
      const auto outputs = pipeline.evaluate(x);
      if (rank < n - 1) {
        EXPECT_TRUE(outputs.empty());
        continue;
      }
      EXPECT_TRUE(torch::allclose(outputs.at(0), oracle.forward(x)));
      EXPECT_FALSE(outputs.at(0).requires_grad());
    }
  });
}

// Two pipelines of two stages, whose gradients are averaged.
class PipelineBackend : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, PipelineBackend, test::backends_and_nodes());

TEST_P(PipelineBackend, PipelinesTrainTogether) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    const auto mesh = init_device_mesh({2, 2}, {"dp", "pp"});
    const int replica = mesh.get_local_rank("dp");
    const int number = mesh.get_local_rank("pp");
    EXPECT_EQ(rank, 2 * replica + number);
    for (const std::int64_t m : {1, 3}) {
      const auto stage = stage_of(number, at::kDouble);
      Pipeline pipeline(
          stage, squares,
          {.n_microbatches = m,
           .process_group = mesh.get_group("pp"),
           .ddp = DdpOptions{.broadcast_buffers = false, .process_group = mesh.get_group("dp")}});
      torch::optim::SGD sgd(stage->parameters(), 0.1);
      Oracle oracle(2, at::kDouble);
      torch::optim::SGD expected(oracle.parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        sgd.zero_grad();
        expected.zero_grad();
        const auto own = input_of(step, replica);
        pipeline.step(own, target_of(own));
        for (const int one : {0, 1})
          oracle.step(input_of(step, one), target_of(input_of(step, one)), m);
        for (const auto& parameter : oracle.parameters()) parameter.mutable_grad().div_(2);
        sgd.step();
        expected.step();
        test::expect_close(stage->parameters(), oracle.stage(number)->parameters(), 1e-12);
      }
    }
  });
}

// A stage whose buffers change only if they are broadcast.
torch::nn::Sequential stage_with_buffers() {
  torch::manual_seed(1);
  return torch::nn::Sequential(
      torch::nn::Linear(kWidth, kWidth),
      torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(kWidth).momentum(0)));
}

TEST(Pipeline, BroadcastsBuffersOfPipelinesThatTrainTogether) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto mesh = init_device_mesh({2, 1}, {"dp", "pp"});
    for (const std::int64_t m : {1, 3}) {
      const auto stage = stage_with_buffers();
      Pipeline pipeline(stage, squares,
                        {.n_microbatches = m,
                         .process_group = mesh.get_group("pp"),
                         .ddp = DdpOptions{.process_group = mesh.get_group("dp")}});
      const auto x = input_of(0).to(at::kFloat);
      pipeline.step(x, target_of(x));
      auto mean = stage->named_buffers()["1.running_mean"];
      mean.fill_(rank == 0 ? 3 : 7);
      pipeline.step(x, target_of(x));
      EXPECT_TRUE(mean.eq(3).all().item<bool>()) << m;
    }
  });
}

TEST(Pipeline, ChecksTheModelsOfPipelinesThatTrainTogether) {
  for (const std::int64_t m : {1, 3}) {
    EXPECT_THAT(errors_of(2,
                          [&](int rank) {
                            const auto mesh = init_device_mesh({2, 1}, {"dp", "pp"});
                            const auto stage = stage_with_buffers();
                            Pipeline pipeline(
                                stage, squares,
                                {.n_microbatches = m,
                                 .process_group = mesh.get_group("pp"),
                                 .ddp = DdpOptions{.process_group = mesh.get_group("dp"),
                                                   .check_sync_every = 1}});
                            const auto x = input_of(0).to(at::kFloat);
                            pipeline.step(x, target_of(x));
                            const torch::NoGradGuard no_grad;
                            for (auto& parameter : stage->parameters()) parameter.add_(rank);
                            const torch::AutoGradMode grad(true);
                            pipeline.step(x, target_of(x));
                          }),
                Each(HasSubstr("0.weight on rank 1 differs")))
        << m;
  }
}

TEST(Pipeline, PipelinesThatTrainTogetherTakeAHook) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto mesh = init_device_mesh({2, 1}, {"dp", "pp"});
    const auto stage = stage_with_buffers();
    Pipeline pipeline(stage, squares,
                      {.n_microbatches = 3,
                       .process_group = mesh.get_group("pp"),
                       .ddp = DdpOptions{.process_group = mesh.get_group("dp")}});
    int calls = 0;
    pipeline.register_comm_hook([&](GradBucket& bucket) {
      ++calls;
      return comm_hooks::all_reduce()(bucket);
    });
    const auto x = input_of(0, rank).to(at::kFloat);
    pipeline.step(x, target_of(x));
    EXPECT_EQ(calls, 1);
    Pipeline alone(stage, squares, {.process_group = mesh.get_group("pp")});
    EXPECT_THROW(alone.register_comm_hook(nullptr), UsageError);
  });
}

TEST_P(PipelineBackend, StagesPassOnSeveralTensors) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    torch::manual_seed(5);
    Fork fork;
    Join join;
    const auto own_gradients = [&] {
      std::vector<at::Tensor> all;
      for (const auto& p : rank == 0 ? fork->parameters() : join->parameters()) {
        all.push_back(p.grad().clone());
        p.mutable_grad().reset();
      }
      return bytes_of(all);
    };
    const auto x = input_of(0).to(at::kFloat);
    for (std::size_t i = 0; i < 2; ++i) {
      const auto part = x.chunk(2)[i];
      const auto [y, same, rest] = fork->forward(part);
      (squares(join->forward(y, same, rest[0], rest[1]), target_of(x).chunk(2)[i]) / 2).backward();
    }
    const auto expected = own_gradients();
    const PipelineOptions options{.n_microbatches = 2};
    if (rank == 0) {
      Pipeline(fork, squares, options).step(x, {});
    } else {
      Pipeline(join, squares, options).step(at::Tensor(), target_of(x));
    }
    EXPECT_EQ(own_gradients(), expected);
  });
}

struct WithoutMaskImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) {
    EXPECT_TRUE(inputs.size() == 1 || (!inputs.at(1).defined() && inputs.at(2).size(0) == 2));
    const auto y = linear(inputs.at(0));
    return {y, at::Tensor(), torch::ones({2}) + inputs.back().sum()};
  }
};
TORCH_MODULE(WithoutMask);

TEST(Pipeline, StagesPassOnUndefinedTensors) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const auto loss = [](const std::vector<at::Tensor>& outputs, const at::Tensor& target) {
      EXPECT_EQ(outputs.size(), 3u);
      return squares(outputs[0], target);
    };
    WithoutMask stage;
    Pipeline pipeline(stage, loss, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(x, target_of(x));
    EXPECT_GT(stage->linear->weight.grad().abs().sum().item<float>(), 0);
    const auto outputs = pipeline.evaluate(x);
    ASSERT_EQ(outputs.size(), rank == 2 ? 3u : 0u);
    EXPECT_FALSE(rank == 2 && outputs[1].defined());
  });
}

// The first stage is frozen, so nothing flows back to it.
TEST(Pipeline, FrozenStagesGetNoGradients) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const auto stage = stage_of(rank);
    for (auto& parameter : stage->parameters()) parameter.requires_grad_(rank > 0);
    Pipeline pipeline(stage, squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(x, target_of(x));
    for (const auto& parameter : stage->parameters())
      EXPECT_EQ(parameter.grad().defined(), rank > 0);
    EXPECT_EQ(pipeline.stats().bytes_received == 0, rank == 0);
  });
}

// A stage's module and loss may take and return vectors.
struct ListsImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) {
    return {linear(inputs[0]), inputs[0] * 2};
  }
};
TORCH_MODULE(Lists);

TEST(Pipeline, StagesAndLossesTakeVectors) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    std::size_t outputs_seen = 0;
    const auto loss = [&](const std::vector<at::Tensor>& outputs, const at::Tensor& target) {
      outputs_seen = outputs.size();
      return squares(outputs[0] + outputs[1], target);
    };
    Lists stage;
    Pipeline pipeline(stage, loss, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(std::vector<at::Tensor>{x}, target_of(x));
    EXPECT_EQ(outputs_seen, rank == 1 ? 2u : 0u);
    EXPECT_GT(stage->linear->weight.grad().abs().sum().item<float>(), 0);
  });
}

TEST(Pipeline, AStageMayChangeItsInputsInPlace) {
  expect_torch_ranks(3, "paceline", [](int rank, int n) {
    const auto make = [](int number) {
      torch::nn::Sequential stage(torch::nn::ReLU(torch::nn::ReLUOptions(true)));
      stage->extend(*stage_of(number));
      return number == 0 ? stage_of(number) : stage;
    };
    Oracle oracle(n);
    for (int i = 0; i < n; ++i) oracle.stage(i) = make(i);
    const auto stage = make(rank);
    Pipeline pipeline(stage, squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(x, target_of(x));
    oracle.step(x, target_of(x), 2);
    EXPECT_EQ(bytes_of(state_of(stage)), bytes_of(state_of(oracle.stage(rank))));
  });
}

TEST(Pipeline, CountsTheBytesOfStepsOnly) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    Pipeline pipeline(stage_of(rank), squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.evaluate(x);
    for (const int steps : {1, 2}) {
      pipeline.step(x, target_of(x));
      EXPECT_EQ(pipeline.stats().bytes_sent, steps * static_cast<std::int64_t>(x.nbytes()));
      EXPECT_EQ(pipeline.stats().bytes_received, pipeline.stats().bytes_sent);
      pipeline.evaluate(x);
    }
  });
}

// Keeps the layouts of what it gets, and of the gradient of what it returns.
struct LayoutsImpl : torch::nn::Module {
  torch::nn::Conv2d conv{
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1)))};
  std::vector<bool> are_channels_last;
  at::Tensor forward(const at::Tensor& x) {
    const auto note = [this](const at::Tensor& tensor) {
      are_channels_last.push_back(tensor.is_contiguous(at::MemoryFormat::ChannelsLast));
    };
    note(x);
    auto y = conv(x);
    if (y.requires_grad()) y.register_hook([=](const at::Tensor& gradient) { note(gradient); });
    return y;
  }
};
TORCH_MODULE(Layouts);

TEST(Pipeline, StagesPassOnTheMemoryFormat) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    for (const bool is_channels_last : {true, false}) {
      const auto make = [](int number) {
        torch::manual_seed(static_cast<std::uint64_t>(number));
        return Layouts();
      };
      std::vector<Layouts> whole{make(0), make(1)};
      const auto stage = make(rank);
      torch::manual_seed(2);
      const auto x = torch::randn({2, 4, 5, 7})
                         .contiguous(is_channels_last ? at::MemoryFormat::ChannelsLast
                                                      : at::MemoryFormat::Contiguous);
      Pipeline pipeline(stage, squares);
      pipeline.step(x, x.cos());
      squares(whole[1](whole[0](x)), x.cos()).backward();
      const auto& same = whole[static_cast<std::size_t>(rank)];
      EXPECT_EQ(stage->are_channels_last.at(0), is_channels_last);
      EXPECT_EQ(stage->are_channels_last, same->are_channels_last);
      EXPECT_TRUE(stage->conv->weight.grad().equal(same->conv->weight.grad()));
    }
  });
}

// Counts which of its outputs are alive.
struct WatchedImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outputs{};
  std::ptrdiff_t most = 0;
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor output = linear(x);
    outputs.push_back(output.storage().getWeakStorageImpl());
    most = std::max(most,
                    std::ranges::count_if(outputs, [](const auto& one) { return !one.expired(); }));
    return output;
  }
};
TORCH_MODULE(Watched);

TEST(Pipeline, KeepsNoOutputsThatHaveArrived) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    Watched stage;
    Pipeline pipeline(stage, squares,
                      {.n_microbatches = kSamples, .schedule = PipelineSchedule::one_f_one_b});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(x, target_of(x));
    EXPECT_LE(stage->most, kSamples / 2);  // two, if messages were complete at once
  });
}

TEST(Pipeline, RecordsWhenItComputed) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    Pipeline pipeline(stage_of(rank), squares, {.n_microbatches = 4});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(x, target_of(x));
    std::chrono::nanoseconds before{};
    for (const PipelineAction& action : pipeline.stats().last) {
      EXPECT_GE(action.begin, before);
      EXPECT_GE(action.end, action.begin);
      before = action.end;
    }
    EXPECT_GE(pipeline.stats().last_time, before);
  });
}

}  // namespace
}  // namespace paceline
