#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <csignal>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>

#include "support/small_net.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

// Gradients of 64 KiB and more are born in shared memory, and reduced there.
namespace paceline {
namespace {

using test::expect_close;
using test::expect_torch_ranks;
using test::kAcrossNodes;

constexpr std::size_t kWide = 20000;  // elements of a gradient that is large enough

// Two large weights of one size, one of another, and small biases.
struct WideImpl : torch::nn::Module {
  explicit WideImpl(int hidden = 160) {
    first = register_module("first", torch::nn::Linear(hidden, hidden));
    second = register_module("second", torch::nn::Linear(hidden, hidden));
    last = register_module("last", torch::nn::Linear(hidden, 130));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(Wide);

Wide make_wide(int hidden = 160) {
  torch::manual_seed(5);
  return Wide(hidden);
}

torch::Tensor input_of(int rank, int step, int hidden = 160) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank));
  return torch::randn({12, hidden});
}

torch::Tensor loss_of(const torch::Tensor& output) {
  return output.pow(2).mean();
}

std::size_t bytes_of_small(const torch::nn::Module& module) {
  std::size_t bytes = 0;
  for (const auto& parameter : module.parameters()) {
    if (parameter.numel() < static_cast<std::int64_t>(kWide)) bytes += parameter.nbytes();
  }
  return bytes;
}

std::int64_t allocated_bytes(const ProcessGroup& group = {}) {
  return static_cast<std::int64_t>(
      group.c10d()->getBackend(at::kCPU)->getMemoryStats().at("allocated_bytes"));
}

bool is_shared(const torch::Tensor& tensor) {
  const torch::Tensor ordinary = torch::empty({1});
  return tensor.storage().data_ptr().get_deleter() != ordinary.storage().data_ptr().get_deleter();
}

template <typename Model>
void step(Model&& model, torch::optim::Optimizer& optimizer, const torch::Tensor& x,
          bool set_to_none = true) {
  optimizer.zero_grad(set_to_none);
  loss_of(model(x)).backward();
  optimizer.step();
}

// One process that sees the batches of all ranks.
template <typename Net, typename Input>
std::vector<torch::Tensor> train_alone(Net net, int size, int steps, Input input) {
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  for (int s = 0; s < steps; ++s) {
    sgd.zero_grad();
    for (int rank = 0; rank < size; ++rank) (loss_of(net(input(rank, s))) / size).backward();
    sgd.step();
  }
  return net->parameters();
}

std::vector<torch::Tensor> train_wide_alone(int size, int steps) {
  return train_alone(make_wide(), size, steps, [](int rank, int s) { return input_of(rank, s); });
}

void check_training(int rank, int size, const DdpOptions& options, std::size_t copied,
                    bool set_to_none) {
  DistributedDataParallel model(make_wide(), options);
  torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  constexpr int kSteps = 6;
  for (int s = 0; s < kSteps; ++s) {
    step(model, sgd, input_of(rank, s), set_to_none);
    if (set_to_none) {
      EXPECT_EQ(model.stats().last.copied, size > 1 ? copied : 0) << "step " << s;
    }
  }
  EXPECT_EQ(model.stats().steps, 6u);
  expect_close(model.parameters(), train_wide_alone(size, kSteps), 1e-5);
}

std::vector<test::WorldCase> on_one_node_and_two() {
  std::vector<test::WorldCase> cases;
  for (const int size : test::kWorldSizes) cases.push_back({"paceline", size});
  if (is_gloo_available()) {
    for (const int size : {2, 3, 4}) cases.push_back({kAcrossNodes, size});
  }
  return cases;
}

using ZeroCopyWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, ZeroCopyWorlds, ::testing::ValuesIn(on_one_node_and_two()),
                         test::CaseName());

TEST_P(ZeroCopyWorlds, ReducesLargeGradientsInPlace) {
  for (const bool set_to_none : {true, false}) {
    expect_torch_ranks(GetParam(), [=](int rank, int ranks) {
      check_training(rank, ranks, {}, bytes_of_small(*make_wide()), set_to_none);
    });
  }
}

TEST(ZeroCopy, DoesNotCopyWithoutBucketView) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    check_training(rank, size, {.gradient_as_bucket_view = false}, bytes_of_small(*make_wide()),
                   true);
  });
}

TEST(ZeroCopy, CanBeDisabled) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    std::size_t all = 0;
    for (const auto& parameter : make_wide()->parameters()) all += parameter.nbytes();
    check_training(rank, size, {.zero_copy = false}, all, true);
  });
}

TEST(ZeroCopy, OtherBackendsCopy) {
  expect_torch_ranks(2, "gloo", [](int rank, int size) {
    std::size_t all = 0;
    for (const auto& parameter : make_wide()->parameters()) all += parameter.nbytes();
    check_training(rank, size, {}, all, true);
  });
}

// On one node and on two.
using ZeroCopyNodes = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(
    , ZeroCopyNodes,
    ::testing::ValuesIn(is_gloo_available() ? std::vector<std::string>{"paceline", kAcrossNodes}
                                            : std::vector<std::string>{"paceline"}),
    test::CaseName());

TEST_P(ZeroCopyNodes, AccumulatesUnderNoSync) {
  expect_torch_ranks(3, GetParam(), [](int rank, int size) {
    DistributedDataParallel model(make_wide());
    auto alone = make_wide();
    for (int s = 0; s < 3; ++s) {
      for (int micro = 0; micro < 3; ++micro) {
        auto guard = model.no_sync(micro < 2);
        loss_of(model(input_of(rank, 3 * s + micro))).backward();
        for (int r = 0; r < size; ++r) {
          (loss_of(alone(input_of(r, 3 * s + micro))) / size).backward();
        }
      }
      EXPECT_EQ(model.stats().last.copied, s == 0 ? bytes_of_small(*model.module()) : 0);
      for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
        const auto expected = alone->parameters()[i].grad();
        EXPECT_TRUE(torch::allclose(model.parameters()[i].grad(), expected, 1e-4, 1e-7))
            << "the gradients of " << s + 1 << " steps, parameter " << i;
      }
    }
  });
}

struct ConvNetImpl : torch::nn::Module {
  torch::nn::Conv2d first{register_module("first", torch::nn::Conv2d(16, 64, 5))};
  torch::nn::Conv2d second{register_module("second", torch::nn::Conv2d(64, 64, 3))};
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::relu(first(x))); }
};
TORCH_MODULE(ConvNet);

// oneDNN asks the allocator for memory in a way of its own.
TEST(ZeroCopy, SupportsConvolutionsAndChannelsLast) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    expect_torch_ranks(2, "paceline", [=](int rank, int size) {
      const auto make = [&] {
        torch::manual_seed(2);
        ConvNet net;
        for (auto& p : net->parameters()) {
          if (p.dim() == 4) p.set_data(p.contiguous(format));
        }
        return net;
      };
      const auto input = [&](int of, int s) {
        torch::manual_seed(static_cast<std::uint64_t>(10 * s + of));
        return torch::randn({4, 16, 14, 14}).contiguous(format);
      };
      DistributedDataParallel model(make());
      torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
      for (int s = 0; s < 4; ++s) step(model, sgd, input(rank, s));
      EXPECT_LE(model.stats().last.copied, bytes_of_small(*model.module()));
      expect_close(model.parameters(), train_alone(make(), size, 4, input), 1e-4);
    });
  }
}

TEST(ZeroCopy, SupportsSeveralModelsAndLargerOnesLater) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    const auto group = new_group({0, 1});
    DistributedDataParallel first(make_wide());
    DistributedDataParallel second(make_wide(), {.process_group = group});
    torch::optim::SGD sgd(first.parameters(), 0.1);
    auto both = first.parameters();
    for (const auto& parameter : second.parameters()) both.push_back(parameter);
    torch::optim::SGD optimizer(both, torch::optim::SGDOptions(0.1).momentum(0.5));
    for (int s = 0; s < 4; ++s) {
      optimizer.zero_grad();
      const auto x = input_of(rank, s);
      (loss_of(first(x)) + loss_of(second(x))).backward();
      optimizer.step();
    }
    const auto expected = train_wide_alone(size, 4);
    expect_close(first.parameters(), expected, 1e-5);
    expect_close(second.parameters(), expected, 1e-5);
    for (const int hidden : {200, 300, 400}) {
      DistributedDataParallel model(make_wide(hidden));
      torch::optim::SGD grown(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
      for (int s = 0; s < 3; ++s) step(model, grown, input_of(rank, s, hidden));
      EXPECT_EQ(model.stats().last.copied, bytes_of_small(*model.module()));
      expect_close(model.parameters(),
                   train_alone(make_wide(hidden), size, 3,
                               [&](int of, int s) { return input_of(of, s, hidden); }),
                   1e-5);
    }
  });
}

TEST(ZeroCopy, GradientsOutliveModelAndWorld) {
  test::run_torch_ranks(2, "paceline", [](const test::RankContext& context) {
    torch::Tensor gradient;
    torch::Tensor expected;
    {
      const World world = init_process_group(context.init);
      DistributedDataParallel model(make_wide());
      loss_of(model(input_of(context.rank, 0))).backward();
      gradient = model.module()->first->weight.grad();
      expected = gradient.clone();
      EXPECT_GT(allocated_bytes(), 0);
    }
    EXPECT_TRUE(torch::equal(gradient, expected));
    gradient.add_(1);
    gradient.reset();
    return std::string();
  });
}

TEST_P(ZeroCopyNodes, FreesAllMemory) {
  // Across nodes, a leader keeps what the ranks of its node share.
  const std::int64_t kept = GetParam() == kAcrossNodes ? 4096 : 0;
  expect_torch_ranks(3, GetParam(), [=](int rank, int /*size*/) {
    const auto before = allocated_bytes();
    {
      DistributedDataParallel model(make_wide());
      torch::optim::SGD sgd(model.parameters(), 0.1);
      step(model, sgd, input_of(rank, 0));
      step(model, sgd, input_of(rank, 1));
      const auto after_two = allocated_bytes();
      for (int s = 2; s < 20; ++s) step(model, sgd, input_of(rank, s));
      EXPECT_EQ(allocated_bytes(), after_two);
    }
    // Control blocks are never used again; a reducer's takes some cache lines.
    EXPECT_LE(allocated_bytes() - before, kept);
  });
}

// Keeps whatever has the size of a gradient, and lets nothing of it go.
struct Hoard : torch::autograd::Function<Hoard> {
  static inline std::vector<torch::Tensor> kept;
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list& grads) {
    for (int i = 0; i < 50; ++i) kept.push_back(torch::zeros({160, 160}));
    return {grads[0].clone()};
  }
};

TEST(ZeroCopy, AllocatesAtMostItsCap) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    DistributedDataParallel model(make_wide());
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    const auto weight = static_cast<std::int64_t>(model.module()->first->weight.nbytes());
    const auto before = allocated_bytes();
    for (int s = 0; s < 3; ++s) {
      step([&](const auto& x) { return Hoard::apply(model(x)); }, sgd, input_of(rank, s));
    }
    EXPECT_LE(allocated_bytes() - before, (2 + 8) * weight + 130 * 160 * 4);
    EXPECT_GT(model.stats().last.copied, bytes_of_small(*model.module()));
    Hoard::kept.clear();
    expect_close(model.parameters(), train_wide_alone(size, 3), 1e-5);
  });
}

// Counts; stacked under our allocator or above it.
struct CountingAllocator final : c10::Allocator {
  explicit CountingAllocator(c10::Allocator* below) : below_(below) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    ++count;
    return below_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return below_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::atomic<std::size_t> count = 0;
  c10::Allocator* below_;
};

void set_counting_allocator(CountingAllocator*& set, std::uint8_t priority) {
  set = new CountingAllocator(c10::GetCPUAllocator());  // LibTorch keeps it for good
  c10::SetCPUAllocator(set, priority);
}

TEST(ZeroCopy, ForwardsToTheAllocatorThatWasSet) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    CountingAllocator* below = nullptr;
    set_counting_allocator(below, 7);
    check_training(rank, size, {}, bytes_of_small(*make_wide()), true);
    EXPECT_GT(below->count, 10u);
    // One that knows nothing of ours but asks it, and one that does not even ask.
    CountingAllocator* above = nullptr;
    set_counting_allocator(above, 7);
    check_training(rank, size, {}, bytes_of_small(*make_wide()), true);
    EXPECT_GT(above->count, 10u);
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 7);
    DistributedDataParallel model(make_wide());
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    for (int s = 0; s < 3; ++s) step(model, sgd, input_of(rank, s));
    EXPECT_GT(model.stats().last.copied, bytes_of_small(*model.module()));
    expect_close(model.parameters(), train_wide_alone(size, 3), 1e-5);
  });
}

TEST(ZeroCopy, ForkedChildAllocatesGradientsElsewhere) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    DistributedDataParallel model(make_wide());
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    step(model, sgd, input_of(rank, 0));
    const auto before = model.module()->first->weight.grad().clone();
    const pid_t child = fork();
    if (child == 0) {
      auto net = make_wide();
      loss_of(net(input_of(rank, 0))).backward();
      sgd.zero_grad();  // frees what is stored in shared memory
      _exit(net->first->weight.grad().defined() ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_TRUE(torch::equal(model.module()->first->weight.grad(), before));
    step(model, sgd, input_of(rank, 1));
    step(model, sgd, input_of(rank, 2));
    expect_close(model.parameters(), train_wide_alone(size, 3), 1e-5);
  });
}

TEST(ZeroCopy, AbortedStepLeavesNoMemory) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    DistributedDataParallel model(make_wide());
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    bool fails = false;
    std::int64_t held = 0;
    model.module()->first->weight.register_hook([&](const torch::Tensor& gradient) {
      if (fails && rank == 1) throw std::runtime_error("on purpose");
      return gradient;
    });
    for (int s = 0; s < 4; ++s) {
      if (s == 2) {
        held = allocated_bytes();
        fails = true;
        sgd.zero_grad();
        EXPECT_ANY_THROW(loss_of(model(input_of(rank, 90))).backward());
        fails = false;
      }
      step(model, sgd, input_of(rank, s));
    }
    EXPECT_EQ(allocated_bytes(), held);
    expect_close(model.parameters(), train_wide_alone(size, 4), 1e-5);
  });
}

// Rank 1 dies when some of its gradients are published; what is in theirs is the others' own then.
TEST_P(ZeroCopyNodes, GradientsSurviveALostRank) {
  const auto ends = test::run_torch_ranks(3, GetParam(), [](const test::RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_wide());
    loss_of(model(input_of(context.rank, 0))).backward();
    EXPECT_TRUE(is_shared(model.module()->last->weight.grad()));
    model.module()->first->weight.register_hook([&](const torch::Tensor& gradient) {
      if (context.rank == 1) ::raise(SIGKILL);
      return gradient;
    });
    model.module()->zero_grad();
    EXPECT_THROW(loss_of(model(input_of(context.rank, 1))).backward(), PeerLost);
    const torch::Tensor gradient = model.module()->last->weight.grad();
    // A rank that is late learns of the loss before it has one.
    EXPECT_FALSE(gradient.defined() && is_shared(gradient));
    return std::string();
  });
  for (const std::size_t other : {0, 2}) {
    EXPECT_TRUE(ends[other].exited_cleanly()) << ends[other].report;
  }
}

TEST(ZeroCopy, UnusedParametersKeepTheirGradients) {
  expect_torch_ranks(2, "paceline", [](int rank, int /*size*/) {
    DistributedDataParallel model(make_wide(), {.find_unused_parameters = true});
    loss_of(model(input_of(rank, 0))).backward();
    const auto weight = model.module()->last->weight;
    const auto before = weight.grad().clone();
    const auto x = input_of(rank, 1);
    model(x);  // whose output, and so `last`, takes part nowhere
    loss_of(model.module()->second(torch::tanh(model.module()->first(x)))).backward();
    EXPECT_TRUE(torch::equal(weight.grad(), before));
  });
}

}  // namespace
}  // namespace paceline
