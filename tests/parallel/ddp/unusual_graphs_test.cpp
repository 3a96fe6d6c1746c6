#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "parallel/ddp/pair.h"
#include "support/cases.h"
#include "support/torch_ranks.h"

// Gradients that alias other tensors, are conjugate views or sparse, are missing on one rank, or
// arrive after the model is gone.
namespace paceline {
namespace {

using test::averaged_gradients;
using test::backends;
using test::check_steps;
using test::expect_gradients;
using test::expect_torch_ranks;
using test::input_of;
using test::make_pair;
using test::Pair;
using test::PairImpl;
using test::squared_norm;
using torch::Tensor;

// What autograd hands over for w is memory that the branch of v has yet to read.
TEST(Aliases, GradientReadByOtherBranchesIsNotReducedInPlace) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    check_steps(make_pair({128, 256}, {256, 256},
                          [](PairImpl& self, const Tensor& x) {
                            return torch::mm(x, self.v) + self.w.t().t();
                          }),
                {128, 256}, {}, rank, size);
  });
}

TEST(Aliases, ParametersThatShareAGradientGetOneEach) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    Pair pair = make_pair({128, 256}, {1, 128, 256}, [](PairImpl& self, const Tensor& x) {
      return x * (self.v.squeeze(0) + self.w.view({256, 128}).view({128, 256}));
    });
    DistributedDataParallel model(pair);
    const Tensor x = input_of(rank, 0, {128, 256});
    auto averages = averaged_gradients(pair, x, size);
    for (int step = 0; step < 2; ++step) squared_norm(model(x)).backward();
    for (Tensor& average : averages) average = 2 * average;
    expect_gradients(pair, averages, "accumulated");
  });
}

using ConjugateBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, ConjugateBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(ConjugateBackends, GradientsAreTheirValues) {
  expect_torch_ranks(2, GetParam(), [](int rank, int size) {
    check_steps(
        make_pair(
            {20000}, {10},
            [](PairImpl& self, const Tensor& x) { return self.w.conj() * x + self.v.conj().sum(); },
            at::kComplexFloat),
        {20000}, {}, rank, size, at::kComplexFloat);
  });
}

using StaticGraphBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, StaticGraphBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(StaticGraphBackends, AParameterThatOneRankUsesIsAveragedOnAll) {
  for (const bool view : {true, false}) {
    expect_torch_ranks(2, GetParam(), [=](int rank, int size) {
      check_steps(make_pair({10}, {10},
                            [rank](PairImpl& self, const Tensor& x) {
                              return rank == 0 ? x * self.v + self.w : x * self.v;
                            }),
                  {10}, {.gradient_as_bucket_view = view, .static_graph = true}, rank, size);
    });
  }
}

TEST(StaticGraph, AnOutputMayOutliveItsModel) {
  expect_torch_ranks(2, "paceline", [](int rank, int /*size*/) {
    Pair pair =
        make_pair({10}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
    Tensor output;
    {
      DistributedDataParallel model(pair, {.static_graph = true});
      output = model(input_of(rank, 0, {10}));
    }
    squared_norm(output).backward();
    EXPECT_TRUE(pair->w.grad().defined());
  });
}

// Such as those for a penalty. One rank may ask for more of them than the others.
TEST(StaticGraph, GradientsThatAreReturnedAreNoStep) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    Pair pair = make_pair(
        {10}, {10}, [](PairImpl& self, const Tensor& x) { return (x * self.v + self.w).tanh(); });
    DistributedDataParallel model(pair, {.static_graph = true});
    const auto loss = [](const Tensor& y, const Tensor& x) {
      return squared_norm(y) +
             squared_norm(torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0]);
    };
    for (int step = 0; step < 3; ++step) {
      const Tensor x = input_of(rank, step, {10}).requires_grad_();
      auto averages = torch::autograd::grad({loss(pair->forward(x), x)}, {pair->w, pair->v});
      for (Tensor& average : averages) {
        all_reduce(average);
        average = average / size;
      }
      pair->zero_grad();
      const Tensor y = model(x);
      if (rank == 0) torch::autograd::grad({y.sum()}, {pair->w, pair->v}, {}, true);
      loss(y, x).backward();
      expect_gradients(pair, averages, "with a penalty");
    }
  });
}

TEST(Sparse, FunctionalEmbeddingMayHaveADenseParameter) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    Pair pair = make_pair({50, 4}, {4}, [](PairImpl& self, const Tensor& x) {
      return torch::embedding(self.w, x.to(at::kLong), -1, false, true) * self.v;
    });
    torch::manual_seed(static_cast<std::uint64_t>(rank));
    const Tensor x = torch::randint(50, {6}).to(at::kDouble);
    auto averages = torch::autograd::grad(
        {squared_norm(torch::embedding(pair->w, x.to(at::kLong)) * pair->v)}, {pair->w, pair->v});
    for (Tensor& average : averages) {
      all_reduce(average);
      average = average / size;
    }
    DistributedDataParallel model(pair);
    squared_norm(model(x)).backward();
    expect_gradients(pair, averages, "of an embedding");
  });
}

}  // namespace
}  // namespace paceline
