#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "support/cases.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"
#include "trace/timeline.h"

// Graphs and gradients that differ from what a plain stack of layers has.
namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;

struct PairImpl : torch::nn::Module {
  using Body = std::function<Tensor(PairImpl&, const Tensor&)>;
  PairImpl(const Tensor& first, const Tensor& second, Body run)
      : w(register_parameter("w", first)), v(register_parameter("v", second)), body(run) {}
  Tensor forward(const Tensor& x) { return body(*this, x); }
  Tensor w, v;
  Body body;
};
TORCH_MODULE(Pair);

Pair make_pair(at::IntArrayRef w, at::IntArrayRef v, const PairImpl::Body& body,
               at::ScalarType type = at::kDouble) {
  torch::manual_seed(1);
  return Pair(torch::randn(w, type), torch::randn(v, type), body);
}

Tensor input_of(int rank, int step, at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  torch::manual_seed(static_cast<std::uint64_t>(10 + 100 * step + rank));
  return torch::randn(sizes, type);
}

Tensor loss_of(const Tensor& output) {
  return (output.is_complex() ? at::view_as_real(output.resolve_conj()) : output).pow(2).sum();
}

// The average of what each rank's graph gives, of w and v; computed without DDP.
std::vector<Tensor> expected(Pair& pair, const Tensor& x, int size) {
  std::vector<Tensor> averages;
  const auto gradients =
      torch::autograd::grad({loss_of(pair->forward(x))}, {pair->w, pair->v}, {}, {}, false, true);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Tensor& like = i == 0 ? pair->w : pair->v;
    const Tensor sum = gradients[i].defined() ? gradients[i].resolve_conj().contiguous().clone()
                                              : torch::zeros_like(like);
    all_reduce(sum);
    averages.push_back(sum / size);
  }
  return averages;
}

void expect_gradients(const Pair& pair, const std::vector<Tensor>& averages, const char* when) {
  const std::vector<Tensor> got{pair->w.grad(), pair->v.grad()};
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(got[i].defined()) << when;
    EXPECT_TRUE(torch::allclose(got[i].resolve_conj(), averages[i], 1e-4, 1e-5))
        << when << ", parameter " << i;
  }
}

void check_steps(Pair pair, at::IntArrayRef sizes, const DdpOptions& options, int rank, int size,
                 at::ScalarType type = at::kDouble) {
  DistributedDataParallel model(pair, options);
  for (int step = 0; step < 3; ++step) {
    const Tensor x = input_of(rank, step, sizes, type);
    const auto averages = expected(pair, x, size);
    pair->zero_grad();
    loss_of(model(x)).backward();
    expect_gradients(pair, averages, "after a step");
  }
}

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
    auto averages = expected(pair, x, size);
    for (int step = 0; step < 2; ++step) loss_of(model(x)).backward();
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

// With w reduced when v is.
DdpOptions delayed(DdpOptions options) {
  options.delay_all_reduce_named_params = {"w"};
  options.param_to_hook_all_reduce = "v";
  return options;
}

using DelayedParametersBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DelayedParametersBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(DelayedParametersBackends, WorkWithOtherOptions) {
  for (const bool view : {true, false}) {
    for (const bool is_static : {true, false}) {
      expect_torch_ranks(2, GetParam(), [=](int rank, int size) {
        const DdpOptions options =
            delayed({.gradient_as_bucket_view = view, .static_graph = is_static});
        check_steps(
            make_pair({20000}, {10},
                      [](PairImpl& self, const Tensor& x) { return self.v.sum() * x * self.w; }),
            {20000}, options, rank, size);
      });
    }
  }
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
    loss_of(output).backward();
    EXPECT_TRUE(pair->w.grad().defined());
  });
}

// Has backwards throw on rank 1 when they come to `v`. Returns the number of the hook.
unsigned throw_on_rank_1(const Tensor& v, int rank) {
  return v.register_hook([rank](const Tensor& gradient) {
    if (rank == 1) throw std::runtime_error("on purpose");
    return gradient;
  });
}

// The gradient of w is there already then.
void fail_on_the_way(DistributedDataParallel<PairImpl>& model, const Tensor& x, int rank) {
  const Tensor& v = model.module()->v;
  const unsigned hook = throw_on_rank_1(v, rank);
  EXPECT_ANY_THROW(loss_of(model(x)).backward());
  v.remove_hook(hook);
}

using AbortedStepBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, AbortedStepBackends, ::testing::ValuesIn(backends()), test::CaseName());

// Nothing of the aborted step is left, on any rank, wherever gradients are stored.
TEST_P(AbortedStepBackends, NextForwardSetsGradientsToZero) {
  const std::vector<DdpOptions> all{
      {.bucket_cap_mb = 0.00001},
      {.gradient_as_bucket_view = false},
      {.bucket_cap_mb = 0.00001, .gradient_as_bucket_view = false, .zero_copy = false},
      {.find_unused_parameters = true, .skip_all_reduce_unused_params = true}};
  for (const DdpOptions& options : all) {
    expect_torch_ranks(2, GetParam(), [&](int rank, int size) {
      Pair pair = make_pair(
          {20000}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v.sum() + self.w; });
      const Tensor x = input_of(rank, 0, {20000});
      const auto averages = expected(pair, x, size);
      DistributedDataParallel model(pair, options);
      loss_of(model(x)).backward();
      pair->zero_grad();
      fail_on_the_way(model, x, rank);
      loss_of(model(x)).backward();  // with no zero_grad
      expect_gradients(pair, averages, "after an aborted step");
    });
  }
}

// That w was used in it counts no longer, on the one rank that came so far.
TEST_P(AbortedStepBackends, ForgetsItsUsedParameters) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    bool both = true;
    Pair pair = make_pair({10}, {10}, [&](PairImpl& self, const Tensor& x) {
      return both ? x * self.v + self.w : x * self.v;
    });
    DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001,
                                         .find_unused_parameters = true,
                                         .skip_all_reduce_unused_params = true});
    const Tensor x = input_of(rank, 0, {10});
    loss_of(model(x)).backward();
    fail_on_the_way(model, x, rank);
    pair->zero_grad();
    both = false;
    loss_of(model(x)).backward();
    EXPECT_FALSE(pair->w.grad().defined());
  });
}

// Buckets are made anew after the first step.
TEST(AbortedStep, IsReportedWithItsNumber) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    Pair pair =
        make_pair({10}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
    DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001});
    const Tensor x = input_of(rank, 0, {10});
    for (int step = 1; step <= 3; ++step) loss_of(model(x)).backward();
    throw_on_rank_1(pair->v, rank);
    try {
      loss_of(model(x)).backward();
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_EQ(error.sequence(), 4U);
      EXPECT_THAT(error.what(), HasSubstr("step 4"));
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(rank, 1) << error.what();
    }
    model(x);  // so that rank 1 stays until rank 0 has been told
  });
}

// What the timeline shows of the next step begins with its own forward.
TEST(AbortedStep, DoesNotCountInTheNextStepsTime) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    const test::TemporaryDirectory directory;
    trace::Timeline::start(directory.path(), rank, size);
    {
      Pair pair = make_pair({10}, {10},
                            [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
      DistributedDataParallel model(pair, {.bucket_cap_mb = 0.00001});
      const Tensor x = input_of(rank, 0, {10});
      for (int step = 0; step < 2; ++step) loss_of(model(x)).backward();
      fail_on_the_way(model, x, rank);
      loss_of(model(x)).backward();
    }
    trace::Timeline::stop();
    std::ifstream file(directory.path() / fmt::format("rank{}.json", rank));
    std::map<std::string, double> begin;  // of the last of a kind
    for (const auto& event : nlohmann::json::parse(file)) {
      if (event["ph"] == "X") begin[event["cat"]] = event["ts"];
    }
    EXPECT_EQ(begin.at("step"), begin.at("forward"));
  });
}

struct TripleImpl : torch::nn::Module {
  Tensor w{register_parameter("w", torch::ones({2}))};
  Tensor v{register_parameter("v", torch::ones({2}))};
  Tensor u{register_parameter("u", torch::ones({2}))};
  Tensor forward(const Tensor& x, bool all) { return all ? v.sum() * x * w + u : x * u; }
};
TORCH_MODULE(Triple);

TEST_P(DelayedParametersBackends, AbortedStepLeavesNothing) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Triple net;
    DistributedDataParallel model(net, delayed({}));
    const unsigned hook = throw_on_rank_1(net->v, rank);
    const Tensor x = torch::full({2}, rank + 1.0);
    EXPECT_ANY_THROW(model(x, true).sum().backward());
    net->v.remove_hook(hook);
    model(x, true).sum().backward();
    EXPECT_TRUE(net->w.grad().equal(torch::full({2}, 3.0)));
    EXPECT_TRUE(net->v.grad().equal(torch::full({2}, 3.0)));
    EXPECT_TRUE(net->u.grad().equal(torch::full({2}, 1.0)));
  });
}

// v tells that w is used, also where it has its gradient in a backward that is not synchronised.
TEST_P(DelayedParametersBackends, AveragesParametersUsedUnderNoSync) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Triple net;
    DistributedDataParallel model(net, delayed({.find_unused_parameters = true}));
    const Tensor x = torch::full({2}, rank + 1.0);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      {
        const auto guard = model.no_sync();
        model(x, true).sum().backward();
      }
      model(x, false).sum().backward();
      EXPECT_TRUE(net->w.grad().equal(torch::full({2}, 3.0)));
      EXPECT_TRUE(net->v.grad().equal(torch::full({2}, 3.0)));
      EXPECT_TRUE(net->u.grad().equal(torch::full({2}, 2.5)));
    }
  });
}

using LoadedAfterWrappingBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, LoadedAfterWrappingBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

// Which exchanges what parameters are made of.
TEST_P(LoadedAfterWrappingBackends, RanksTrainTheSameModel) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Triple net;
    DistributedDataParallel model(net);
    const Tensor x = torch::full({2}, rank + 1.0);
    model(x, true).sum().backward();
    std::stringstream file;
    torch::save(net, file);
    torch::load(net, file);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model(x, true).sum().backward();
      EXPECT_TRUE(net->w.grad().equal(torch::full({2}, 3.0)));
    }
    EXPECT_EQ(model.stats().steps, 3U);
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
        {loss_of(torch::embedding(pair->w, x.to(at::kLong)) * pair->v)}, {pair->w, pair->v});
    for (Tensor& average : averages) {
      all_reduce(average);
      average = average / size;
    }
    DistributedDataParallel model(pair);
    loss_of(model(x)).backward();
    expect_gradients(pair, averages, "of an embedding");
  });
}

TEST(Ddp, RejectsUnsupportedUse) {
  expect_torch_ranks(2, "paceline", [](int rank, int /*size*/) {
    const auto product = [](PairImpl& self, const Tensor& x) { return x * self.v * self.w; };
    const auto computed = torch::randn({3}).requires_grad_() * 0.1;
    EXPECT_THAT([&] { DistributedDataParallel(Pair(computed, torch::randn({3}), product)); },
                ThrowsMessage<UsageError>(HasSubstr("parameter w was computed from")));

    DistributedDataParallel model(make_pair({10}, {10}, product));
    loss_of(model(input_of(rank, 0, {10}))).backward();
    EXPECT_THAT([&] { model.register_comm_hook(comm_hooks::all_reduce()); },
                ThrowsMessage<UsageError>(HasSubstr("before the first backward")));

    torch::nn::BatchNorm1d untracked(torch::nn::BatchNorm1dOptions(3).track_running_stats(false));
    EXPECT_THAT([&] { convert_sync_batchnorm(*untracked); },
                ThrowsMessage<UsageError>(HasSubstr("has no running statistics")));

    Pair moved = make_pair({10}, {10}, product);
    DistributedDataParallel before(moved);
    moved->to(at::kFloat);
    EXPECT_THAT([&] { before(input_of(rank, 0, {10}, at::kFloat)); },
                ThrowsMessage<UsageError>(HasSubstr("parameter w has changed its type")));

    SyncBatchNorm norm(3);
    const auto x = torch::randn({4, 3}).requires_grad_();
    EXPECT_THAT([&] { torch::autograd::grad({loss_of(norm(x))}, {x}, {}, true, true); },
                ThrowsMessage<UsageError>(HasSubstr("no second derivatives")));
  });
}

}  // namespace
}  // namespace paceline
