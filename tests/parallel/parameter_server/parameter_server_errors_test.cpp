#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "parallel/parameter_server/job.h"
#include "parallel/parameter_server/jobs.h"

namespace paceline {
namespace {

using test::JobContext;
using test::run_job;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;

at::Tensor ones(std::vector<std::int64_t> shape = {2}) {
  return torch::ones(shape, torch::TensorOptions().requires_grad(true));
}

// What a job of one process that would be the worker of rank 1 refuses.
std::string refusal(const NamedTensors& parameters, ParameterServerOptions options) {
  try {
    if (!options.init.world_size) {
      options.init.world_size = 2;
      options.init.rank = 1;
    }
    options.init.timeout = std::chrono::milliseconds(50);
    options.init.store = c10::make_intrusive<distributed::MemoryStore>(
        fmt::format("/proc/self/fd/{}", ::memfd_create("store", 0)), "the store");
    const ParameterServer server(parameters, test::sgd(1), options);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(ParameterServerErrors, OptionsAreChecked) {
  EXPECT_THAT(refusal({{"w", ones()}}, {.servers = 0}), HasSubstr("with 0 servers"));
  EXPECT_THAT(refusal({{"w", ones()}}, {.staleness = -1}), HasSubstr("a staleness of -1"));
  EXPECT_THAT(refusal({{"v", ones()}, {"w", ones()}}, {.servers = 2}),
              HasSubstr("no rank is left to be a worker"));
  EXPECT_THAT(refusal({{"w", ones()}}, {.servers = 2}), HasSubstr("for a model of 1 parameters"));
  EXPECT_THAT(refusal({{"w", ones()}}, {.init = {.backend = "gloo"}}), HasSubstr("backend gloo"));
  EXPECT_THAT(refusal({{"w", ones()}}, {.init = {.enable_reconfigure = true}}),
              HasSubstr("enable_reconfigure"));
}

TEST(ParameterServerErrors, ParametersAreDenseAndOnTheCpu) {
  const auto sparse = torch::eye(2).to_sparse();
  EXPECT_THAT(refusal({{"s", sparse}}, {}), AllOf(HasSubstr("ParameterServer: s is"),
                                                  HasSubstr("Sparse"), HasSubstr("dense tensors")));
  const auto meta = torch::ones({2}, torch::kMeta);
  EXPECT_THAT(refusal({{"m", meta}}, {}),
              AllOf(HasSubstr("ParameterServer: m is"), HasSubstr("on meta")));
}

TEST(ParameterServerErrors, AServerThatDoesNotComeIsATimeout) {
  EXPECT_THAT(refusal({{"w", ones()}}, {}),
              HasSubstr("rank 0, a server, did not come within the timeout of 0.05 s"));
}

// Rank 2 has another model, or other options. Rank 1 goes on.
std::string difference(const NamedTensors& other,
                       const std::function<void(ParameterServerOptions&)>& change = {}) {
  const auto ends = run_job({.workers = 2}, [&](const JobContext& context) {
    auto options = context.options;
    if (context.rank == 2 && change) change(options);
    const NamedTensors own{{"v", ones({2})}, {"w", ones({3})}};
    try {
      ParameterServer server(context.rank == 2 ? other : own, test::sgd(1), options);
      server.is_server() ? server.serve() : server.step();
    } catch (const Mismatch& error) {
      EXPECT_EQ(context.rank, 2);
      return std::string(error.what());
    }
    return std::string();
  });
  test::expect_clean(ends);
  return ends[2].report;
}

TEST(ParameterServerErrors, DifferentModelsNameTheFirstDifference) {
  EXPECT_THAT(difference({{"v", ones({2})}, {"x", ones({3})}}),
              AllOf(HasSubstr("w, a parameter of shape [3]"), HasSubstr("on rank 0 and x,")));
  EXPECT_THAT(difference({{"v", ones({2})}, {"w", ones({4})}}), HasSubstr("shape [4]"));
  EXPECT_THAT(difference({{"v", ones({2})}, {"w", ones({3}).detach().to(torch::kFloat64)}}),
              HasSubstr("type Double"));
  EXPECT_THAT(difference({{"v", ones({2})}}), HasSubstr("nothing more on rank 2"));
}

TEST(ParameterServerErrors, DifferentOptionsAreNamed) {
  EXPECT_THAT(difference({{"v", ones({2})}, {"w", ones({3})}},
                         [](auto& options) { options.staleness = 2; }),
              HasSubstr("staleness = 0 on rank 0 and staleness = 2 on rank 2"));
}

// Of three ranks, `other` counts two servers, and the others one. Within the timeout of a minute.
std::vector<std::string> errors_of_two_servers_on(int other) {
  const auto ends = run_job({.workers = 2}, [&](const JobContext& context) {
    auto options = context.options;
    if (context.rank == other) options.servers = 2;
    try {
      ParameterServer server({{"v", ones()}, {"w", ones()}}, test::sgd(1), options);
      server.is_server() ? server.serve() : server.step();
    } catch (const PeerError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
  test::expect_clean(ends);
  return {ends[0].report, ends[1].report, ends[2].report};
}

TEST(ParameterServerErrors, DifferentNumbersOfServersAreNamed) {
  const auto names = [](int one, int servers, int other, int others) {
    return HasSubstr(fmt::format("servers = {} on rank {} and servers = {} on rank {}: it must be",
                                 servers, one, others, other));
  };
  EXPECT_THAT(errors_of_two_servers_on(0),
              ElementsAre(names(0, 2, 2, 1), names(1, 1, 0, 2), names(2, 1, 0, 2)));
  EXPECT_THAT(errors_of_two_servers_on(1), ElementsAre("no error", names(1, 2, 2, 1), "no error"));
  EXPECT_THAT(errors_of_two_servers_on(2), ElementsAre("no error", "no error", names(2, 2, 0, 1)));
}

TEST(ParameterServerErrors, AWorkerThatDoesNotMeetItsServerIsNamed) {
  const auto ends = run_job({.workers = 1}, [](const JobContext& context) {
    if (context.rank == 1) {
      parameter_server::Job job(context.options);
      job.announce();
      context.store->set("announced", "");
      context.store->wait({"served"});
      return std::string();
    }
    context.store->wait({"announced"});
    auto options = context.options;
    options.init.timeout = std::chrono::milliseconds(100);
    ParameterServer server({{"w", ones()}}, test::sgd(1), options);
    try {
      server.serve();
    } catch (const PeerLost& error) {
      context.store->set("served", "");
      return std::string(error.what());
    }
    return std::string("no error");
  });
  test::expect_clean(ends);
  EXPECT_THAT(ends[0].report,
              EndsWith("rank 1 did not come to the rendezvous of group of server 0 and worker 1 "
                       "within the timeout of 0.1 s; this is rank 0"));
}

TEST(ParameterServerErrors, CallsBelongToOneRole) {
  const auto ends = run_job({.workers = 1}, [](const JobContext& context) {
    auto w = ones();
    ParameterServer server({{"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      EXPECT_THROW(server.pull(), UsageError);
      EXPECT_THROW(server.step(), UsageError);
      EXPECT_THROW(server.leave(), UsageError);
      server.serve();
      EXPECT_THROW(server.serve(), UsageError);
      return std::string();
    }
    EXPECT_THROW(server.serve(), UsageError);
    EXPECT_THROW(static_cast<void>(server.stats()), UsageError);
    w.mutable_grad() = torch::eye(2).to_sparse().select(0, 0);
    EXPECT_THROW(server.push(), UsageError);
    w.mutable_grad() = torch::ones({2});
    server.step();  // the refused push has sent nothing
    EXPECT_EQ(w[0].item<float>(), 0);
    server.leave();
    EXPECT_THROW(server.pull(), UsageError);
    return std::string();
  });
  test::expect_clean(ends);
}

class FailingSgd final : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    throw std::runtime_error("the optimizer has failed");
  }
};

// Within the timeout of a minute.
TEST(ParameterServerErrors, AServerThatMakesNoOptimizerIsLost) {
  const auto ends = run_job({.workers = 2}, [](const JobContext& context) {
    const auto no_optimizer = [&](auto) -> std::unique_ptr<torch::optim::Optimizer> {
      if (context.rank == 0) throw std::runtime_error("no learning rate");
      return nullptr;
    };
    try {
      ParameterServer server({{"w", ones()}}, no_optimizer, context.options);
    } catch (const PeerLost& error) {
      EXPECT_NE(context.rank, 0);
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(0));
      return std::string(error.what());
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_EQ(ends[0].report, "no learning rate");
  for (const std::size_t worker : {1U, 2U}) EXPECT_THAT(ends[worker].report, HasSubstr("rank 0"));
}

TEST(ParameterServerErrors, WhatTheOptimizerThrowsReachesEveryRank) {
  for (const std::optional<std::int64_t> staleness :
       {std::optional<std::int64_t>(0), std::optional<std::int64_t>()}) {
    const auto ends =
        run_job({.workers = 2, .staleness = staleness}, [](const JobContext& context) {
          auto w = ones();
          ParameterServer server(
              {{"w", w}},
              [](auto parameters) {
                return std::make_unique<FailingSgd>(std::move(parameters),
                                                    torch::optim::SGDOptions(1));
              },
              context.options);
          if (!server.is_server()) {
            context.store->set(fmt::format("here {}", context.rank), "");
            context.store->wait({"here 1", "here 2"});
          }
          try {
            w.mutable_grad() = torch::ones({2});
            server.is_server() ? server.serve() : server.step();
          } catch (const PeerLost& error) {
            EXPECT_THAT(error.ranks(), ::testing::ElementsAre(0));
            return std::string("PeerLost: ") + error.what();
          } catch (const std::runtime_error& error) {
            EXPECT_EQ(context.rank, 0) << error.what();
            return std::string(error.what());
          }
          return std::string("no error");
        });
    for (const auto& end : ends) {
      EXPECT_THAT(end.report, HasSubstr("the optimizer has failed"));
      EXPECT_TRUE(end.exited_cleanly()) << end.report;
    }
  }
}

// The other worker goes on.
TEST(ParameterServerErrors, AWorkerThatThrowsCountsAsLost) {
  const auto ends = run_job({.workers = 2}, [](const JobContext& context) {
    auto w = ones();
    try {
      ParameterServer server({{"w", w}}, test::sgd(1), context.options);
      if (context.rank == 2) throw std::runtime_error("bad input");
      if (!server.is_server()) {
        w.mutable_grad() = torch::ones({2});
        server.step();
        return std::string();
      }
      server.serve();
      EXPECT_EQ(server.stats().workers.at(1).updates, 1);
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  });
  test::expect_clean(ends);
  EXPECT_EQ(ends[2].report, "bad input");
}

}  // namespace
}  // namespace paceline
