#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <map>
#include <optional>

#include <paceline/data_parallel.h>
#include <paceline/error.h>

#include "parallel/data_parallel/nets.h"

namespace paceline {
namespace {

using test::make;
using test::random_batch;
using test::TwoLayers;
using test::TwoLayersImpl;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

// The number of the replica, where the first column of a batch of that many samples counts them.
std::int64_t replica_of(const at::Tensor& x) {
  return x[0][0].item<std::int64_t>();
}
at::Tensor numbered(std::int64_t replicas) {
  return torch::arange(replicas, at::kDouble).unsqueeze(1).expand({-1, 4});
}

TEST(DataParallelErrors, AReplicasExceptionNamesIt) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  for (const std::int64_t bad : {0, 1}) {
    const auto apply = [&] {
      model.parallel_apply(
          [&](TwoLayersImpl&, const at::Tensor& x) {
            if (replica_of(x) == bad) throw std::runtime_error("no more memory");
            return x;
          },
          numbered(2));
    };
    EXPECT_THAT(apply, ThrowsMessage<Error>("replica " + std::to_string(bad) +
                                            " of 2 on cpu: no more memory"));
    try {
      apply();
    } catch (const Error& error) {
      EXPECT_THROW(std::rethrow_if_nested(error), std::runtime_error);
    }
    EXPECT_NO_THROW(model(numbered(2)));
  }
}

TEST(DataParallelErrors, OfSeveralTheFirstReplicasIsThrownOnceAllHaveEnded) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 4});
  std::atomic<int> ended = 0;
  const auto apply = [&] {
    model.parallel_apply(
        [&](TwoLayersImpl&, const at::Tensor& x) {
          ++ended;
          if (replica_of(x) > 0) TORCH_CHECK(false, "bad ", replica_of(x));
          return x;
        },
        numbered(4));
  };
  EXPECT_THAT(apply, ThrowsMessage<Error>("replica 1 of 4 on cpu: bad 1"));
  EXPECT_EQ(ended, 4);
}

TEST(DataParallelErrors, NamesTheDevice) {
  auto model = test::make_with_meta();
  EXPECT_THAT(
      [&] {
        model.parallel_apply(
            [](test::ScaleImpl&, const at::Tensor& x) {
              if (x.is_meta()) throw 5;
            },
            numbered(2));
      },
      ThrowsMessage<Error>(HasSubstr("replica 1 of 2 on meta: an exception that is not")));
}

struct FailsInBackward : torch::autograd::Function<FailsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& y,
                            bool fails) {
    context->saved_data["fails"] = fails;
    return y * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (context->saved_data["fails"].toBool()) throw std::runtime_error("not differentiable");
    return {gradients[0], {}};
  }
};

TEST(DataParallelErrors, NamesAParameterThatTheModuleHasGot) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  model(random_batch(4));
  net->register_parameter("more", torch::ones({2}, at::kDouble));
  const auto forwards = [&] {
    for (int i = 0; i < 4; ++i) model(random_batch(4));
  };
  EXPECT_THAT(forwards, ThrowsMessage<UsageError>(
                            HasSubstr("the module has got parameter more since the replicas")));
}

TEST(DataParallelErrors, ABackwardsExceptionNamesTheReplica) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 3});
  for (const std::int64_t bad : {0, 2}) {
    const auto y = model.parallel_apply(
        [&](TwoLayersImpl& replica, const at::Tensor& x) {
          return FailsInBackward::apply(replica.forward(x), replica_of(x) == bad);
        },
        numbered(3));
    EXPECT_THAT([&] { y.sum().backward(); },
                ThrowsMessage<Error>(HasSubstr("replica " + std::to_string(bad) +
                                               " of 3 on cpu: not differentiable")));
    EXPECT_FALSE(net->first->weight.grad().defined());
  }
  model(numbered(3)).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
}

// It would get no gradient.
TEST(DataParallelErrors, RefusesAnotherLeafInTheGraph) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto temperature = torch::ones({3, 1}, at::requires_grad());
  const auto scaled = [&](const at::Tensor& by) {
    return model.parallel_apply(
        [&](TwoLayersImpl& replica, const at::Tensor& x) {
          return replica.forward(x) * by.exp()[0];
        },
        numbered(2));
  };
  EXPECT_THAT([&] { scaled(temperature); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("a tensor of shape [3, 1]"),
                                              HasSubstr("register it as a parameter"))));
  EXPECT_NO_THROW(scaled(temperature.detach()).sum().backward());
  EXPECT_THAT([&] { model.parallel_apply([&](TwoLayersImpl&) { return temperature; }); },
              ThrowsMessage<UsageError>(HasSubstr("a tensor of shape [3, 1]")));
  const torch::NoGradGuard no_grad;
  EXPECT_NO_THROW(scaled(temperature));
}

// As for forces, which are gradients of an energy.
TEST(DataParallelErrors, ALeafOfAReplicasOwnIsNone) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto forces = model.parallel_apply(
      [](TwoLayersImpl& replica, const at::Tensor& x) {
        const auto position = x.detach().requires_grad_();
        const auto energy = replica.forward(position).sum();
        return torch::autograd::grad({energy}, {position}, {}, true, true)[0];
      },
      random_batch(4));
  forces.pow(2).sum().backward();
  EXPECT_TRUE(model.module()->first->weight.grad().defined());
}

TEST(DataParallelErrors, RefusesToBeCalledWithinItsReplicas) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto loss = model(numbered(2)).sum();
  EXPECT_THAT(
      [&] {
        model.parallel_apply([&](TwoLayersImpl&, const at::Tensor& x) { return model(x); },
                             numbered(2));
      },
      ThrowsMessage<UsageError>(HasSubstr("within its own replicas")));
  EXPECT_THAT(
      [&] {
        model.parallel_apply(
            [&](TwoLayersImpl&, const at::Tensor& x) {
              if (replica_of(x) == 1) loss.backward();
            },
            numbered(2));
      },
      ThrowsMessage<UsageError>(HasSubstr("within its own replicas")));
  EXPECT_NO_THROW(loss.backward());
}

TEST(DataParallelErrors, AnotherOneMayRunWithinReplicas) {
  auto net = make<TwoLayers>();
  DataParallel outer(make<TwoLayers>(), {.num_replicas = 2});
  const torch::NoGradGuard no_grad;  // parameters of `net` would get no gradients
  const auto sums = outer.parallel_apply(
      [&](TwoLayersImpl&, const at::Tensor& x) {
        DataParallel inner(net, {.num_replicas = 2});
        return inner(at::cat({x, x}));
      },
      numbered(2));
  EXPECT_EQ(sums.size(0), 4);
}

TEST(DataParallelErrors, TensorsOfABatchMustAgree) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto apply = [&](const at::Tensor& x, const at::Tensor& y) {
    model.parallel_apply([](TwoLayersImpl&, const at::Tensor&, const at::Tensor&) {}, x, y);
  };
  EXPECT_THAT(
      [&] {
        apply(at::ones({6, 4}), at::ones(5));
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("tensors 0 and 1"), HasSubstr("[6, 4]"),
                                      HasSubstr("[5]"), HasSubstr("6 and 5 samples"))));
  EXPECT_THAT(
      [&] {
        apply(at::ones({6, 4}), at::scalar_tensor(5));
      },
      ThrowsMessage<UsageError>(HasSubstr("tensor 1 of the arguments has the shape [] and "
                                          "no dimension 0")));
  DataParallel by_columns(make<TwoLayers>(), {.dim = 2, .num_replicas = 2});
  EXPECT_THAT(
      [&] {
        by_columns(at::ones({6, 4}));
      },
      ThrowsMessage<UsageError>(HasSubstr("no dimension 2")));
}

template <typename Function>
void expect_outputs_refused(const char* message, Function&& function, std::int64_t dim = 0) {
  DataParallel model(make<TwoLayers>(), {.dim = dim, .num_replicas = 2});
  const auto x = numbered(2);
  EXPECT_THAT(
      [&] {
        model.parallel_apply(
            [&](TwoLayersImpl&, const at::Tensor& part) { return function(replica_of(part)); }, x);
      },
      ThrowsMessage<UsageError>(HasSubstr(message)));
}

TEST(DataParallelErrors, OutputsOfReplicasMustAgree) {
  using Map = std::map<std::string, at::Tensor>;
  const auto one = at::ones({2, 2});
  expect_outputs_refused("1 tensors and replica 1 2", [&](std::int64_t replica) {
    return std::vector<at::Tensor>(static_cast<std::size_t>(replica) + 1, one);
  });
  expect_outputs_refused("nested differently", [&](std::int64_t replica) {
    return replica == 0 ? Map{{"a", one}} : Map{{"b", one}};
  });
  expect_outputs_refused("the shape [2, 1] in replica 0, and the shape [2, 2] in replica 1",
                         [&](std::int64_t replica) {
                           return at::ones({2, replica + 1});
                         });
  expect_outputs_refused("the shape [2, 2] in replica 0, and no value in replica 1",
                         [&](std::int64_t replica) { return replica == 0 ? one : at::Tensor(); });
  expect_outputs_refused("the shape [] in replica 0, and the shape [2, 2] in replica 1",
                         [&](std::int64_t replica) { return replica == 0 ? one.sum() : one; });
}

TEST(DataParallelErrors, OutputsMustHaveTheDimension) {
  DataParallel model(make<TwoLayers>(), {.dim = 1, .num_replicas = 2});
  EXPECT_THAT(
      [&] {
        model.parallel_apply([](TwoLayersImpl&, const at::Tensor& x) { return x.sum(1); },
                             numbered(2));
      },
      ThrowsMessage<UsageError>(HasSubstr("the shape [2] and no dimension 1")));
}

TEST(DataParallelErrors, RefusesToRunInAForkedChild) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      DataParallel moved = std::move(model);
      moved(numbered(2));
    } catch (const UsageError& error) {
      ::_exit(std::string(error.what()).find("forked child") == std::string::npos ? 2 : 0);
    }
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace paceline
