#include "parallel/ddp/gradient_buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/cases.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline::ddp {
namespace {

using test::expect_torch_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Gradients of the shapes 3, 2x2 and 5; with kTiny a bucket for each.
constexpr double kTiny = 0.00001;

std::vector<NamedTensor> three_parameters() {
  std::vector<NamedTensor> parameters;
  for (const auto& [name, shape] :
       {std::pair{"a", std::vector<std::int64_t>{3}}, {"b", {2, 2}}, {"c", {5}}}) {
    parameters.push_back({name, torch::zeros(shape, torch::kDouble).requires_grad_()});
  }
  return parameters;
}

struct Fixture {
  explicit Fixture(DdpOptions wanted = {.bucket_cap_mb = kTiny}, std::vector<bool> delayed = {},
                   bool exchanges_usage = false)
      : options(std::move(wanted)) {
    delayed.resize(parameters.size());
    buckets.emplace(parameters, options, delayed, exchanges_usage, recorder);
  }
  void begin() { buckets->begin_step({}, {}, {}); }
  void set_gradient(std::size_t i, double value) {
    const at::Tensor& tensor = parameters[i].tensor;
    tensor.mutable_grad() = torch::full_like(tensor, value);
  }
  // The bucket of each parameter.
  std::vector<std::size_t> places() const {
    std::vector<std::size_t> result;
    for (const auto& place : buckets->plan().places) result.push_back(place.bucket);
    return result;
  }
  double gradient(std::size_t i) const {
    const at::Tensor& grad = parameters[i].tensor.grad();
    EXPECT_TRUE(grad.eq(grad.flatten()[0]).all().item<bool>());
    return grad.flatten()[0].item<double>();
  }

  std::vector<NamedTensor> parameters = three_parameters();
  DdpOptions options;
  StepRecorder recorder{at::kCPU, 0};
  std::optional<GradientBuckets> buckets;
};

using GradientBucketsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, GradientBucketsBackends, test::backends_and_nodes(), test::CaseName());

TEST_P(GradientBucketsBackends, AverageWhateverTheOrderOnEachRank) {
  for (const bool view : {true, false}) {
    expect_torch_ranks(2, GetParam(), [=](int rank, int) {
      Fixture of({.bucket_cap_mb = kTiny, .gradient_as_bucket_view = view});
      of.begin();
      const Indices order = rank == 0 ? Indices{0, 1, 2} : Indices{2, 0, 1};
      for (const std::size_t i : order) {
        of.set_gradient(i, static_cast<double>(i) + 4 * rank);
        of.buckets->add(i, true, {});
      }
      const void* const own = of.parameters[0].tensor.grad().data_ptr();
      EXPECT_FALSE(of.buckets->finish({true, true, true}).has_value());
      if (!view) of.buckets->put_back({true, true, true});
      of.buckets->end_step();
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(of.gradient(i), static_cast<double>(i) + 2);
      }
      EXPECT_EQ(of.parameters[0].tensor.grad().data_ptr(), own);
    });
  }
}

TEST(GradientBuckets, HoldDelayedParametersLast) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    EXPECT_THAT(Fixture().places(), ElementsAre(2, 1, 0));
    EXPECT_THAT(Fixture({.bucket_cap_mb = kTiny}, {false, false, true}).places(),
                ElementsAre(1, 0, 2));
  });
}

TEST_P(GradientBucketsBackends, FollowTheOrderOfRankZerosFirstStep) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Fixture of;
    const Indices order = rank == 0 ? Indices{1, 2, 0} : Indices{2, 0, 1};
    for (const Indices& step : {order, Indices{0, 1, 2}}) {
      of.begin();
      for (const std::size_t i : step) of.buckets->add(i, true, {});
      of.buckets->finish({});
      of.buckets->end_step();
    }
    of.buckets->reorder(false);
    EXPECT_THAT(of.places(), ElementsAre(2, 0, 1));
  });
}

TEST_P(GradientBucketsBackends, ExchangeWhichParametersWereUsed) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Fixture of({.bucket_cap_mb = kTiny}, {}, true);
    of.begin();
    for (std::size_t i = 0; i < 3; ++i) of.buckets->add(i, false, {});
    EXPECT_EQ(of.buckets->finish({rank == 0, false, rank == 1}),
              (std::vector<bool>{true, false, true}));
  });
}

TEST_P(GradientBucketsBackends, SkipAllButTheReducersLast) {
  expect_torch_ranks(2, GetParam(), [](int, int) {
    Fixture of({.bucket_cap_mb = kTiny,
                .find_unused_parameters = true,
                .skip_all_reduce_unused_params = true});
    of.begin();
    of.set_gradient(1, 1);
    of.buckets->add(1, true, {});
    EXPECT_EQ(of.buckets->skip({true, false, true}), (std::vector<bool>{true, false, false}));
    of.buckets->add(0, false, {});
    of.buckets->finish({});
    EXPECT_EQ(of.gradient(1), 1);
  });
}

TEST_P(GradientBucketsBackends, ZerosOfARankThatHasJoinedCountAsGradients) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Fixture of;
    of.begin();
    if (rank == 0) {
      for (std::size_t i = 0; i < 3; ++i) {
        of.set_gradient(i, 6);
        of.buckets->add(i, true, {});
      }
    } else {
      of.buckets->add_zeros();
    }
    of.buckets->finish({});
    of.buckets->end_step();
    EXPECT_EQ(of.parameters[0].tensor.grad().defined(), rank == 0);
    if (rank == 0) {
      EXPECT_EQ(of.gradient(2), 3);
    }
    of.buckets->reorder(false);
    EXPECT_THAT(of.places(), ElementsAre(0, 1, 2));
  });
}

TEST(GradientBuckets, DetachedGradientsLeaveTheBuckets) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    Fixture of;
    of.begin();
    of.set_gradient(0, 3);
    of.buckets->add(0, true, {});
    const at::Tensor in_bucket = of.parameters[0].tensor.grad();
    EXPECT_NE(of.buckets->kept_gradient(0).data_ptr(), in_bucket.data_ptr());
    of.buckets->detach();
    EXPECT_NE(of.parameters[0].tensor.grad().data_ptr(), in_bucket.data_ptr());
    EXPECT_EQ(of.gradient(0), 3);
    const void* const own = of.parameters[0].tensor.grad().data_ptr();
    of.buckets->detach();
    EXPECT_EQ(of.parameters[0].tensor.grad().data_ptr(), own);
    of.buckets->forget_gradients();
    EXPECT_EQ(of.gradient(0), 0);
  });
}

TEST_P(GradientBucketsBackends, LeaveGradientsOfASingleRankAlone) {
  expect_torch_ranks(1, GetParam(), [](int, int) {
    Fixture of;
    EXPECT_TRUE(of.buckets->keeps_gradients_in_place());
    of.begin();
    of.set_gradient(1, 7);
    const void* const own = of.parameters[1].tensor.grad().data_ptr();
    for (std::size_t i = 0; i < 3; ++i) of.buckets->add(i, i == 1, {});
    of.buckets->finish({});
    of.buckets->end_step();
    EXPECT_EQ(of.parameters[1].tensor.grad().data_ptr(), own);
    EXPECT_FALSE(of.parameters[0].tensor.grad().defined());
  });
}

TEST(GradientBuckets, TakeOneHookBeforeTheFirstStep) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto hook = [] { return paceline::detail::make_comm_hook(comm_hooks::all_reduce()); };
    Fixture of;
    of.buckets->set_hook(hook());
    EXPECT_FALSE(of.buckets->keeps_gradients_in_place());
    EXPECT_THAT([&] { of.buckets->set_hook(hook()); },
                ThrowsMessage<UsageError>(HasSubstr("has a hook already")));
    Fixture late;
    late.begin();
    EXPECT_THAT([&] { late.buckets->set_hook(hook()); },
                ThrowsMessage<UsageError>(HasSubstr("before the first backward")));
  });
}

}  // namespace
}  // namespace paceline::ddp
