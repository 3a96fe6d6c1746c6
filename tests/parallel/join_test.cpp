#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include <paceline/collectives.h>
#include <paceline/comm_hooks.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "support/small_net.h"
#include "support/temporary_directory.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"
#include "trace/timeline.h"

namespace paceline {
namespace {

using test::batch_of;
using test::bytes_of;
using test::expect_close;
using test::expect_torch_ranks;
using test::kAcrossNodes;
using test::loss_of;
using test::make_net;
using test::RankContext;
using test::WorldCase;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Ranks have different numbers of batches; the one in the middle has none.
int steps_of(int rank, int size) {
  return size > 2 && rank == size / 2 ? 0 : 3 + (2 * rank) % 5;
}
int most_steps(int size) {
  int most = 0;
  for (int rank = 0; rank < size; ++rank) most = std::max(most, steps_of(rank, size));
  return most;
}

enum class Divisor { all, active, samples };

torch::Tensor inputs_of(int rank, int step, Divisor divisor) {
  const auto x = batch_of(rank, step, at::kDouble);
  return divisor == Divisor::samples ? x.narrow(0, 0, 1 + (rank + step) % 5) : x;
}

// What one process gets that has the batches of all ranks.
std::vector<torch::Tensor> train_alone(int size, Divisor divisor, std::uint64_t seed) {
  auto net = make_net(at::kDouble, seed);
  torch::optim::SGD sgd(net->parameters(), 0.05);
  for (int step = 0; step < most_steps(size); ++step) {
    double total = divisor == Divisor::all ? size : 0;
    for (int rank = 0; rank < size; ++rank) {
      if (step >= steps_of(rank, size)) continue;
      if (divisor == Divisor::active) total += 1;
      if (divisor == Divisor::samples) {
        total += static_cast<double>(inputs_of(rank, step, divisor).size(0));
      }
    }
    sgd.zero_grad();
    for (int rank = 0; rank < size; ++rank) {
      if (step >= steps_of(rank, size)) continue;
      const auto x = inputs_of(rank, step, divisor);
      const double weight = divisor == Divisor::samples ? static_cast<double>(x.size(0)) : 1;
      (loss_of(net(x), x) * (weight / total)).backward();
    }
    sgd.step();
  }
  return net->parameters();
}

std::string train_together(int rank, int size, Divisor divisor, const DdpOptions& base) {
  DdpOptions options = base;
  if (divisor == Divisor::samples) options.average = Average::samples;
  DistributedDataParallel one(make_net(at::kDouble, 3), options);
  DistributedDataParallel two(make_net(at::kDouble, 4), options);
  torch::optim::SGD sgd_one(one.parameters(), 0.05);
  torch::optim::SGD sgd_two(two.parameters(), 0.05);
  join({one, two},
       [&] {
         for (int step = 0; step < steps_of(rank, size); ++step) {
           const auto x = inputs_of(rank, step, divisor);
           const auto train = [&](auto& model, auto& sgd) {
             sgd.zero_grad(step % 2 == 0);
             if (divisor == Divisor::samples) model.set_samples(static_cast<double>(x.size(0)));
             loss_of(model(x), x).backward();
             sgd.step();
           };
           train(one, sgd_one);
           train(two, sgd_two);
         }
       },
       {.divide_by_initial_world_size = divisor == Divisor::all});
  expect_close(one.parameters(), train_alone(size, divisor, 3), 1e-11);
  expect_close(two.parameters(), train_alone(size, divisor, 4), 1e-11);
  return bytes_of(one.parameters()) + bytes_of(two.parameters());
}

using JoinWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, JoinWorlds, test::worlds(), test::CaseName());

TEST_P(JoinWorlds, EqualsTheWeightedSingleProcess) {
  const std::string& backend = GetParam().backend;
  const int size = GetParam().size;
  const std::vector<DdpOptions> all{{.bucket_cap_mb = 0.001},
                                    {.find_unused_parameters = true},
                                    {.gradient_as_bucket_view = false},
                                    {.check_sync_every = 1}};
  const auto ends = test::run_torch_ranks(size, backend, [&](const RankContext& context) {
    const World world = init_process_group(context.init);
    std::string bytes;
    for (const Divisor divisor : {Divisor::all, Divisor::active, Divisor::samples}) {
      for (const auto& options : all) {
        // The others' code is the same for every backend and size.
        if (&options != &all[0] && (backend != "paceline" || size > 3)) continue;
        bytes += train_together(context.rank, context.size, divisor, options);
      }
    }
    return std::to_string(std::hash<std::string>{}(bytes));
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << backend << ' ' << size << ": " << end.report;
    EXPECT_EQ(end.report, ends[0].report) << "ranks differ";
  }
}

TEST(Join, SupportsAccumulationBuffersAndHooks) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    torch::nn::Sequential net(torch::nn::Linear(9, 4), torch::nn::BatchNorm1d(4));
    net->to(torch::kDouble);
    DistributedDataParallel model(net);
    model.register_comm_hook(comm_hooks::all_reduce());
    const int steps = 2 + 2 * rank;
    for (int epoch = 0; epoch < 2; ++epoch) {
      model.join([&] {
        for (int step = 0; step < steps; ++step) {
          const auto guard = model.no_sync(step % 2 == 0);
          model(batch_of(rank, step, at::kDouble)).pow(2).sum().backward();
        }
      });
      std::vector<at::Tensor> state = net->parameters();
      for (const auto& buffer : net->buffers()) state.push_back(buffer);
      const auto all = all_gather_bytes(bytes_of(state));
      for (const auto& other : all) EXPECT_EQ(other, all[0]);
      EXPECT_EQ(net->named_buffers()["1.num_batches_tracked"].item<std::int64_t>(), 6 * (epoch + 1))
          << "those of the rank that came last";
    }
  });
}

using JoinBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, JoinBackends, test::backends_and_nodes(), test::CaseName());

TEST_P(JoinBackends, EarlyTerminationThrowsOnAllRanks) {
  const std::string& backend = GetParam();
  const auto ends = test::run_torch_ranks(3, backend, [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_net(at::kDouble));
    try {
      model.join(
          [&] {
            for (int step = 0; step < (context.rank == 1 ? 2 : 5); ++step) {
              const auto x = batch_of(context.rank, step, at::kDouble);
              loss_of(model(x), x).backward();
            }
          },
          {.throw_on_early_termination = true});
    } catch (const Error& error) {
      barrier();  // nobody is left behind
      return std::string(error.what());
    }
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, HasSubstr("rank 1 had no inputs left after 2 steps"));
  }
}

// A joinable of a program's own: it counts what all ranks do.
class Counter final : public Joinable {
 public:
  void count(int by) {
    notify_join();
    auto sum = torch::tensor({by});
    all_reduce(sum);
    total += sum.item<int>();
  }
  ProcessGroup join_process_group() const override { return {}; }
  void main_hook() override { all_reduce(torch::tensor({0})); }
  void post_hook(int last) override {
    auto sum = torch::tensor({total});
    broadcast(sum, {.src = last});
    total = sum.item<int>();
    ++post_hooks;
  }
  int total = 0;
  int post_hooks = 0;
};

TEST(Join, AcceptsTheProgramsOwnJoinables) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    Counter counter;
    join({counter}, [&] {
      for (int step = 0; step <= rank; ++step) counter.count(rank + 1);
    });
    EXPECT_EQ(counter.total, 1 + 2 * 2 + 3 * 3);
    counter.count(1);
    EXPECT_EQ(counter.total, 14 + 3);
  });
}

TEST(Join, CallsPostHooksInAnyWorldUnlessDisabled) {
  for (const int ranks : {1, 2}) {
    expect_torch_ranks(ranks, "paceline", [](int /*rank*/, int size) {
      Counter one;
      Counter two;
      DistributedDataParallel model(make_net(at::kDouble));
      join({one, two, model}, [&] { one.count(1); });
      EXPECT_EQ(one.post_hooks, 1);
      EXPECT_EQ(two.post_hooks, 1);
      EXPECT_EQ(one.total, size);
      join({one}, [&] { one.count(1); }, {.enable = false});
      EXPECT_EQ(one.post_hooks, 1);
    });
  }
}

TEST(Join, RejectsAJoinableGivenTwice) {
  for (const int ranks : {1, 2}) {
    expect_torch_ranks(ranks, "paceline", [](int /*rank*/, int /*size*/) {
      Counter counter;
      Counter other;
      EXPECT_THAT(
          [&] {
            join({counter, other, counter}, [] {});
          },
          ThrowsMessage<UsageError>(HasSubstr("joinables 0 and 2 (counted from 0) are the "
                                              "same")));
    });
  }
}

TEST(Join, RethrowsAnExceptionOfTheBody) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_net(at::kDouble));
    model.join([&] {
      const auto x = batch_of(context.rank, 0, at::kDouble);
      loss_of(model(x), x).backward();
      if (context.rank == 1) throw std::runtime_error("bad batch");
      loss_of(model(x), x).backward();
    });
    return std::string("no error");
  });
  EXPECT_THAT(ends[0].report, HasSubstr("rank 1"));
  EXPECT_THAT(ends[1].report, HasSubstr("bad batch"));
}

// A program with uneven inputs that trains outside join.
void expect_uneven_inputs_error(const WorldCase& world,
                                const std::function<void(int rank)>& afterwards) {
  expect_torch_ranks(world, [&](int rank, int /*size*/) {
    DistributedDataParallel model(make_net(at::kDouble));
    const auto train = [&] {
      for (int step = 0; step < (rank == 1 ? 2 : 4); ++step) {
        const auto x = batch_of(rank, step, at::kDouble);
        loss_of(model(x), x).backward();
      }
      afterwards(rank);
    };
    // On other nodes, ranks wait for the step, not for a bucket.
    const bool names_bucket =
        world.backend != kAcrossNodes && world.backend != test::kMpiAcrossNodes;
    const auto error = ::testing::ThrowsMessage<PeerError>(
        AllOf(HasSubstr("rank 1 "), HasSubstr("step 3"),
              HasSubstr(names_bucket ? "last.weight" : "step"), HasSubstr("train inside join")));
    if (rank == 1) return train();
    EXPECT_THAT(train, error);
  });
}

// Over Gloo, ranks in different calls wait for the timeout.
std::vector<WorldCase> worlds_that_compare_calls() {
  std::vector<WorldCase> worlds{{"paceline", 2}, {"paceline", 3}};
  if (is_gloo_available()) worlds.insert(worlds.end(), {{kAcrossNodes, 2}, {kAcrossNodes, 3}});
  return worlds;
}

using UnevenInputsWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, UnevenInputsWorlds, ::testing::ValuesIn(worlds_that_compare_calls()),
                         test::CaseName());

TEST_P(UnevenInputsWorlds, WithoutJoinAreReportedAtTheNextCall) {
  expect_uneven_inputs_error(GetParam(), [](int rank) {
    if (rank == 1) {
      EXPECT_THROW(barrier(), Mismatch);
    }
  });
}

TEST_P(UnevenInputsWorlds, WithoutJoinAreReportedWhenARankLeaves) {
  expect_uneven_inputs_error(GetParam(), [](int rank) {
    if (rank == 1) destroy_process_group();
  });
}

// A rank that has joined counts nothing; after join it counts again, though the last forward that
// it shadowed was not synchronised.
TEST_P(JoinBackends, ModelTrainsNormallyAfterwards) {
  const std::string& backend = GetParam();
  expect_torch_ranks(2, backend, [](int rank, int) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net);
    const auto step = [&](bool sync) {
      const auto guard = model.no_sync(!sync);
      model(torch::full({1, 1}, rank + 1.0)).sum().backward();
    };
    model.join(
        [&] {
          step(true);
          if (rank == 0) step(false);
        },
        {.divide_by_initial_world_size = false});
    net->zero_grad();
    step(true);
    EXPECT_EQ(net->weight.grad().item<double>(), 1.5);
  });
}

// By the number of all ranks: a hook knows of no others.
TEST(Join, WithAHookDividesSparseGradientsLikeOthers) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)),
                              torch::nn::Linear(torch::nn::LinearOptions(2, 1).bias(false)));
    DistributedDataParallel model(net);
    model.register_comm_hook(comm_hooks::all_reduce());
    model.join(
        [&] {
          if (rank == 0) model(torch::zeros({1}, at::kLong)).sum().backward();
        },
        {.divide_by_initial_world_size = false});
    if (rank != 0) return;
    const at::Tensor& table = net->at<torch::nn::EmbeddingImpl>(0).weight;
    const at::Tensor& last = net->at<torch::nn::LinearImpl>(1).weight;
    const at::NoGradGuard no_grad;
    expect_close({table.grad().to_dense()[0], last.grad()[0]}, {last[0] / 2, table[0] / 2}, 1e-6);
  });
}

TEST(Join, RejectsSkippedBucketsAndSyncBatchNorm) {
  for (const bool skips : {true, false}) {
    const auto ends = test::run_torch_ranks(2, "paceline", [=](const RankContext& context) {
      const World world = init_process_group(context.init);
      torch::nn::Sequential net(torch::nn::Linear(2, 2));
      if (!skips) net->push_back(SyncBatchNorm(2));
      DistributedDataParallel model(
          net, {.find_unused_parameters = skips, .skip_all_reduce_unused_params = skips});
      model.join([&] {
        if (context.rank == 0) model(torch::ones({4, 2})).sum().backward();
      });
      return std::string("no error");
    });
    for (const auto& end : ends) EXPECT_THAT(end.report, HasSubstr("cannot be used in join"));
  }
}

// The forward's own call says what it was for.
TEST(Join, IsSuggestedForUnevenInputsWithBuffers) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(
        torch::nn::Sequential(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2)));
    for (int step = 0; step < 3 + context.rank; ++step) {
      model(torch::rand({4, 2})).sum().backward();
    }
    all_reduce(torch::ones({3}));
    return std::string("no error");
  });
  EXPECT_THAT(ends[1].report, AllOf(HasSubstr("copying rank 0's buffers before a forward"),
                                    HasSubstr("train inside join")));
}

// A rank without inputs does not make the calls of the others' bodies.
TEST(Join, NamesItselfWhereAnotherRankAveragesItsLoss) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_net(at::kDouble));
    model.join([&] {
      for (int step = 0; step < 2 + context.rank; ++step) {
        const auto x = batch_of(context.rank, step, at::kDouble);
        const auto loss = loss_of(model(x), x);
        loss.backward();
        auto average = loss.detach();
        all_reduce(average);
      }
    });
    return std::string("no error");
  });
  EXPECT_THAT(ends[0].report, HasSubstr("(join was asking whether other ranks have inputs left; "
                                        "in join, make no other collective calls)"));
}

// Steps of one number are the same step on all ranks, those that a rank shadowed included.
TEST(Join, LeavesStepNumbersEqual) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    const test::TemporaryDirectory directory;
    trace::Timeline::start(directory.path(), rank, size);
    {
      DistributedDataParallel model(make_net(at::kDouble));
      const auto train = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
          const auto x = batch_of(rank, step, at::kDouble);
          loss_of(model(x), x).backward();
        }
      };
      model.join([&] { train(2 + 3 * rank); });
      train(1);
    }
    trace::Timeline::stop();
    std::ifstream file(directory.path() / fmt::format("rank{}.json", rank));
    EXPECT_EQ(nlohmann::json::parse(file).back()["args"]["step"], 6);
  });
}

}  // namespace
}  // namespace paceline
