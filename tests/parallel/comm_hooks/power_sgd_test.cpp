#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/power_sgd.h>

#include "parallel/comm_hooks/numpy_random.h"
#include "parallel/comm_hooks/orthogonalize.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using comm_hooks::PowerSgdOptions;
using comm_hooks::PowerSgdState;
using test::expect_torch_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

// By numpy 2: RandomState(seed).randint(1_000_000_000), five times.
TEST(PowerSgdRandom, IsThatOfNumpy) {
  const std::pair<std::uint32_t, std::vector<std::uint32_t>> expected[] = {
      {0, {209652396, 398764591, 924231285, 404868288, 441365315}},
      {1, {717354021, 946286476, 784077896, 491263, 550290313}},
      {12345, {771445218, 601959909, 285080861, 561383553, 789925284}},
      {4294967295, {419326371, 479346978, 697429004, 269265991, 167655348}}};
  for (const auto& [seed, numbers] : expected) {
    comm_hooks::NumpyRandom random(seed);
    for (const std::uint32_t number : numbers) EXPECT_EQ(random.below_1e9(), number);
  }
}

TEST(PowerSgdRandom, GoesOnFromAState) {
  comm_hooks::NumpyRandom random(7);
  for (int i = 0; i < 1000; ++i) random.below_1e9();
  comm_hooks::NumpyRandom other(0);
  ASSERT_TRUE(other.set_state(random.state()));
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(other.below_1e9(), random.below_1e9());
  EXPECT_FALSE(other.set_state("one two"));
}

TEST(PowerSgdOrthogonalize, MakesColumnsOrthonormal) {
  torch::manual_seed(1);
  for (const int columns : {1, 2, 3, 5}) {
    const auto matrix = torch::randn({1, 9, columns}, at::kDouble);
    const auto before = matrix.clone();
    comm_hooks::orthogonalize(matrix, 0);
    const auto product = matrix[0].t().mm(matrix[0]);
    EXPECT_TRUE(torch::allclose(product, torch::eye(columns, at::kDouble), 1e-12, 1e-12));
    // They span the same space: projecting changes nothing.
    const auto projected = matrix[0].mm(matrix[0].t().mm(before[0]));
    EXPECT_TRUE(torch::allclose(projected, before[0], 1e-12, 1e-12));
  }
}

TEST(PowerSgdOrthogonalize, LeavesZerosAsTheyAre) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto matrix = torch::zeros({1, 4, 2}, type);
    comm_hooks::orthogonalize(matrix, 0);
    EXPECT_EQ(matrix.abs().sum().item<float>(), 0);
  }
}

// Numbers that float16 has exactly; pattern of power_sgd_expected.py.
at::Tensor pattern(std::int64_t numbers, int factor, int offset, int modulus, double divisor) {
  const auto values = (torch::arange(numbers) * factor + offset).remainder(modulus) - modulus / 2;
  return values.to(at::kDouble) / divisor;
}

const std::vector<std::vector<std::int64_t>> kShapes{{6, 5}, {20, 24}, {7}, {6, 5}, {5, 2, 9}};

// A model with parameters of kShapes whose gradients are patterns. They are in a bucket in the
// order of kShapes, since they arrive in it.
class PatternModel {
 public:
  explicit PatternModel(at::ScalarType type)
      : parameters_(parameters_of(type)),
        model_(parameters_, [this](int rank, int step) { return forward(rank, step); }) {}

  auto& ddp() { return model_; }
  // A step's averages.
  std::vector<at::Tensor> step(int rank, int number) {
    model_.zero_grad();
    model_(rank, number).backward();
    std::vector<at::Tensor> averages;
    for (std::size_t i = 0; i < kShapes.size(); ++i) averages.push_back(at(i).grad().clone());
    return averages;
  }

 private:
  static NamedTensors parameters_of(at::ScalarType type) {
    NamedTensors named;
    for (std::size_t i = kShapes.size(); i-- > 0;) {
      named.emplace_back("p" + std::to_string(i), torch::zeros(kShapes[i], type).requires_grad_());
    }
    return named;
  }
  const at::Tensor& at(std::size_t i) const { return parameters_[kShapes.size() - 1 - i].second; }
  at::Tensor forward(int rank, int step) const {
    at::Tensor loss = torch::zeros({}, at(0).options());
    for (std::size_t i = kShapes.size(); i-- > 0;) {
      const auto gradient =
          pattern(at(i).numel(), 17, 7 * step + 11 * rank + static_cast<int>(i), 29, 64);
      loss = loss + (at(i).flatten() * gradient.to(at(i).scalar_type())).sum();
    }
    return loss;
  }

  NamedTensors parameters_;
  DistributedDataParallel<std::function<at::Tensor(int, int)>> model_;
};

struct Expected {
  std::string name;
  double rate;
  std::vector<std::vector<double>> steps;  // a norm and a weighted sum for each gradient
};
const std::vector<Expected> kExpected{
#include "power_sgd_expected.inc"
};

struct Case {
  at::ScalarType type = at::kDouble;
  PowerSgdOptions options{};
  std::function<CommHook(CommHook)> wrapper = [](CommHook hook) { return hook; };
  double tolerance = 1e-10;
};

const std::map<std::string, Case> kCases{
    {"rank1", {.options = {.matrix_approximation_rank = 1}}},
    {"rank2", {.options = {.matrix_approximation_rank = 2}}},
    {"rank3", {.options = {.matrix_approximation_rank = 3}}},
    {"rank4", {.options = {.matrix_approximation_rank = 4}}},
    {"float32",
     {.type = at::kFloat, .options = {.matrix_approximation_rank = 2}, .tolerance = 1e-4}},
    {"without_error_feedback", {.options = {.use_error_feedback = false}}},
    {"without_warm_start", {.options = {.warm_start = false}}},
    {"other_numbers",
     {.options = {.min_compression_rate = 1.2,
                  .orthogonalization_epsilon = 0.25,
                  .random_seed = 12345}}},
    {"as_float16",
     {.type = at::kFloat, .wrapper = comm_hooks::fp16_compress_wrapper, .tolerance = 0.02}},
    {"as_bfloat16",
     {.type = at::kFloat, .wrapper = comm_hooks::bf16_compress_wrapper, .tolerance = 0.1}},
};

class PowerSgdBackend : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, PowerSgdBackend, test::backends_and_nodes());

TEST_P(PowerSgdBackend, ComputesWhatPythonsDoes) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    for (const Expected& expected : kExpected) {
      SCOPED_TRACE(expected.name);
      const Case& made = kCases.at(expected.name);
      PowerSgdOptions options = made.options;
      options.start_power_sgd_iter = 2;
      const PowerSgdState state(options);
      PatternModel model(made.type);
      model.ddp().register_comm_hook(made.wrapper(comm_hooks::power_sgd(state)));
      for (std::size_t step = 0; step < expected.steps.size(); ++step) {
        SCOPED_TRACE(step);
        const auto averages = model.step(rank, static_cast<int>(step));
        for (std::size_t i = 0; i < averages.size(); ++i) {
          const auto flat = averages[i].flatten().to(at::kDouble);
          const double norm = expected.steps[step][2 * i];
          EXPECT_NEAR(flat.norm().item<double>(), norm, made.tolerance * norm) << i;
          const auto weights = pattern(flat.numel(), 13, static_cast<int>(i), 31, 16);
          EXPECT_NEAR(flat.dot(weights).item<double>(), expected.steps[step][2 * i + 1],
                      made.tolerance * norm * weights.norm().item<double>())
              << i;
        }
      }
      EXPECT_NEAR(state.compression_stats().compress_rate(), expected.rate, 1e-12);
    }
  });
}

using PowerSgdWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, PowerSgdWorlds, test::worlds(), test::CaseName());

// The ranks' gradients have rank 1 and the same column, so their average has rank 1 too.
TEST_P(PowerSgdWorlds, SendsGradientsOfRankOneExactly) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    for (const bool warm_start : {true, false}) {
      torch::nn::Linear layer(torch::nn::LinearOptions(12, 9).bias(false));
      layer->to(at::kDouble);
      DistributedDataParallel model(layer);
      const PowerSgdState state({.start_power_sgd_iter = 1, .warm_start = warm_start});
      model.register_comm_hook(comm_hooks::power_sgd(state));
      for (int step = 0; step < 4; ++step) {
        model.zero_grad();
        const auto input_of = [&](int one) { return pattern(12, 5, step, 13, 4) * (one + 1.5); };
        const auto seen = pattern(9, 7, 3 * step + 1, 11, 8);
        (model(input_of(rank)) * seen).sum().backward();
        at::Tensor expected = torch::zeros({9, 12}, at::kDouble);
        for (int one = 0; one < n; ++one) expected += torch::outer(seen, input_of(one)) / n;
        EXPECT_TRUE(torch::allclose(layer->weight.grad(), expected, 1e-10, 1e-12)) << step;
      }
    }
  });
}

// Gradients of zeros in the first step, then of the rank that is sent; also in a run that resumes
// between them.
TEST(PowerSgd, AParameterTrainsOnAfterAGradientOfZeros) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    for (const int r : {1, 2, 3}) {
      for (const auto type : {at::kDouble, at::kBFloat16}) {
        SCOPED_TRACE(std::to_string(r) + c10::toString(type));
        const PowerSgdOptions options{.matrix_approximation_rank = r, .start_power_sgd_iter = 0};
        PowerSgdState state(options);
        const auto expect_exact = [&](int first, int last) {
          const auto weight = torch::zeros({16, 24}, type).requires_grad_();
          DistributedDataParallel model(NamedTensors{{"w", weight}},
                                        [&](const at::Tensor& factor) { return weight * factor; });
          model.register_comm_hook(comm_hooks::power_sgd(state));
          for (int step = first; step <= last; ++step) {
            model.zero_grad();
            auto expected = torch::zeros({16, 24}, at::kDouble);
            for (int k = 0; step > 0 && k < r; ++k) {
              expected +=
                  torch::outer(pattern(16, 3 + k, step, 11, 8), pattern(24, 5 + k, step, 13, 4));
            }
            model(expected.to(type) * 2 * rank).sum().backward();
            const double tolerance = type == at::kDouble ? 1e-12 : 0.1;
            const auto error = (weight.grad().to(at::kDouble) - expected).norm().item<double>();
            EXPECT_LE(error, tolerance * expected.norm().item<double>()) << step;
          }
        };
        expect_exact(0, 3);
        state = PowerSgdState(options);
        expect_exact(0, 0);
        const auto saved = state.state_dict();
        const auto q = saved.toGenericDict().at("qs").toGenericDict().at(0).toTensor();
        EXPECT_FALSE(q.any().item<bool>());
        state = PowerSgdState(options);
        state.load_state_dict(saved);
        expect_exact(1, 3);
      }
    }
  });
}

// The factor that begins as zeros leaves the other one without a gradient in the first step.
TEST(PowerSgd, TrainsAFactorWhoseOtherFactorBeginsAsZeros) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    torch::manual_seed(0);
    const auto a = torch::randn({8, 32}, at::kDouble).requires_grad_();
    const auto b = torch::zeros({32, 8}, at::kDouble).requires_grad_();
    const auto wanted = torch::outer(torch::randn({32}), torch::randn({32})).to(at::kDouble) / 8;
    DistributedDataParallel model(NamedTensors{{"a", a}, {"b", b}}, [&](const at::Tensor& x) {
      return (x.mm(a.t()).mm(b.t()) - x.mm(wanted)).square().mean();
    });
    model.register_comm_hook(comm_hooks::power_sgd(PowerSgdState({.start_power_sgd_iter = 0})));
    torch::optim::SGD sgd({a, b}, 0.02);
    for (int step = 0; step < 3; ++step) {
      torch::manual_seed(10 * step + rank);
      sgd.zero_grad();
      model(torch::randn({16, 32}, at::kDouble)).backward();
      EXPECT_EQ(a.grad().any().item<bool>(), step > 0) << step;
      sgd.step();
    }
  });
}

// Also for 16 bits, a bias in a bucket of its own, and a step whose gradients are zero.
TEST_P(PowerSgdWorlds, RanksGetTheSameBits) {
  expect_torch_ranks(GetParam(), [](int rank, int) {
    const auto net = test::make_net(at::kBFloat16);
    DistributedDataParallel model(net->second, {.bucket_cap_mb = test::kTinyBucket});
    const PowerSgdState state({.matrix_approximation_rank = 3, .start_power_sgd_iter = 0});
    model.register_comm_hook(comm_hooks::power_sgd(state));
    for (int step = 0; step < 5; ++step) {
      torch::manual_seed(100 * step + rank);
      const double scale = step == 2 ? 0 : 1;
      (model(torch::randn({4, 40}, at::kBFloat16)).pow(2).sum() * scale).backward();
      for (const at::Tensor& parameter : model.parameters()) {
        EXPECT_TRUE(parameter.grad().isfinite().all().item<bool>());
        const at::Tensor first = parameter.grad().clone();
        broadcast(first, {});
        EXPECT_TRUE(first.equal(parameter.grad()));
      }
    }
  });
}

// What the steps leave out of gradients is what the ranks have kept, on average.
TEST(PowerSgd, FeedsErrorsBack) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    PatternModel model(at::kDouble);
    const PowerSgdState state({.start_power_sgd_iter = 0});
    model.ddp().register_comm_hook(comm_hooks::power_sgd(state));
    at::Tensor left_out = torch::zeros(kShapes[1], at::kDouble);
    for (int step = 0; step < 9; ++step) {
      left_out -= model.step(rank, step)[1];
      for (const int one : {0, 1}) {
        left_out +=
            pattern(left_out.numel(), 17, 7 * step + 11 * one + 1, 29, 64).view(left_out.sizes()) /
            2;
      }
    }
    const std::int64_t parameter = 3;  // of kShapes[1], in the order of the model's parameters
    const auto errors = state.state_dict().toGenericDict().at("errors").toGenericDict();
    const at::Tensor kept = errors.at(parameter).toTensor().clone();
    all_reduce(kept, {.op = ReduceOp::AVG});
    EXPECT_GT(kept.norm().item<double>(), 1);
    EXPECT_TRUE(torch::allclose(kept.view(left_out.sizes()), left_out, 1e-10, 1e-12));
  });
}

TEST(PowerSgd, AResumedRunGoesOnWithTheSameBits) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const PowerSgdOptions options{.matrix_approximation_rank = 2, .start_power_sgd_iter = 2};
    const auto bits = [&](PatternModel& model, int begin, int end) {
      std::vector<at::Tensor> all;
      for (int step = begin; step < end; ++step) {
        for (const auto& average : model.step(rank, step)) all.push_back(average);
      }
      return test::bytes_of(all);
    };
    const PowerSgdState through(options);
    PatternModel first(at::kFloat);
    first.ddp().register_comm_hook(comm_hooks::power_sgd(through));
    bits(first, 0, 4);
    const auto state = through.state_dict();
    const auto expected = bits(first, 4, 8);  // and the state stays
    PowerSgdState resumed(options);
    resumed.load_state_dict(state);
    PatternModel second(at::kFloat);
    second.ddp().register_comm_hook(comm_hooks::power_sgd(resumed));
    EXPECT_EQ(bits(second, 4, 8), expected);
  });
}

TEST(PowerSgd, RejectsTheStateOfAnotherModel) {
  expect_torch_ranks(1, "paceline", [](int rank, int) {
    PowerSgdState state({.start_power_sgd_iter = 0});
    PatternModel model(at::kFloat);
    model.ddp().register_comm_hook(comm_hooks::power_sgd(state));
    model.step(rank, 0);
    PowerSgdState other({.matrix_approximation_rank = 2, .start_power_sgd_iter = 0});
    other.load_state_dict(state.state_dict());
    PatternModel next(at::kFloat);
    next.ddp().register_comm_hook(comm_hooks::power_sgd(other));
    EXPECT_THAT([&] { next.step(rank, 0); },
                ThrowsMessage<std::exception>(HasSubstr("matrix_approximation_rank")));
  });
}

TEST(PowerSgd, RejectsWhatIsNoState) {
  PowerSgdState state;
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  const auto expect_missing = [&](const char* name) {
    EXPECT_THAT([&] { state.load_state_dict(dict); },
                ThrowsMessage<Error>(AllOf(HasSubstr(name), HasSubstr("state_dict returned"))));
  };
  EXPECT_THAT([&] { state.load_state_dict(3); }, ThrowsMessage<Error>(HasSubstr("a Int")));
  expect_missing("iter is missing");
  dict.insert("iter", -1);
  expect_missing("iter is a Int");
  dict.insert_or_assign("iter", 1);
  dict.insert("random", "no numbers");
  expect_missing("random is a String");
}

TEST(PowerSgd, RejectsOptionsOutOfTheirRange) {
  const auto expect_rejected = [](const PowerSgdOptions& options, const char* text) {
    EXPECT_THAT([&] { PowerSgdState state(options); }, ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  expect_rejected({.matrix_approximation_rank = 0}, "matrix_approximation_rank of 0");
  expect_rejected({.start_power_sgd_iter = -1}, "start_power_sgd_iter of -1");
  expect_rejected({.min_compression_rate = 0}, "min_compression_rate of 0");
  expect_rejected({.min_compression_rate = std::nan("")}, "min_compression_rate of nan");
  expect_rejected({.orthogonalization_epsilon = -1}, "orthogonalization_epsilon of -1");
}

TEST(PowerSgd, AStateHasOneHookThatAModelRuns) {
  const PowerSgdState state;
  const CommHook hook = comm_hooks::power_sgd(state);
  EXPECT_THAT([&] { comm_hooks::power_sgd(state); },
              ThrowsMessage<UsageError>(HasSubstr("a state of its own")));
  const at::Tensor gradient = at::ones({1});
  GradBucket bucket(0, 1, gradient, {0}, {1}, {gradient.sizes()}, {gradient}, std::nullopt);
  EXPECT_THAT([&] { hook(bucket); }, ThrowsMessage<UsageError>(HasSubstr("register_comm_hook")));
}

TEST(PowerSgd, EveryRankNamesARankThatDies) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const test::RankContext& context) {
    const World world = init_process_group(context.init);
    PatternModel model(at::kDouble);
    model.ddp().register_comm_hook(
        comm_hooks::power_sgd(PowerSgdState({.start_power_sgd_iter = 0})));
    model.step(context.rank, 0);
    if (context.rank == 1) throw std::runtime_error("out of memory, say");
    model.step(context.rank, 1);
    return std::string("no error");
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(ends[static_cast<std::size_t>(rank)].report, HasSubstr("rank 1"));
  }
}

}  // namespace
}  // namespace paceline
