#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ProcessGroup over_gloo(const BackendOptions& options = {}) {
  return new_group({}, {.backend = "gloo", .backend_options = options});
}

// Where calls use several interfaces in turn, each has connections of its own.
void expect_sums(const ProcessGroup& group, int rank, int size) {
  for (int call = 0; call < 4; ++call) {
    const auto t = at::full({1000}, rank + 1.0);
    all_reduce(t, {.group = group});
    EXPECT_EQ(t[999].item<double>(), size * (size + 1) / 2.0);
  }
}

std::ptrdiff_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

TEST(GlooOptions, ReachGloo) {
  for (const int size : {1, 2, 3, 5}) {
    expect_torch_ranks(size, "paceline", [](int rank, int n) {
      const GlooOptions several{.interfaces = {"lo", "lo", "lo"}};
      const GlooOptions one_thread{.hostnames = {"127.0.0.1", "localhost"}, .threads = 1};
      for (const GlooOptions& options : {several, one_thread}) {
        const ProcessGroup group = over_gloo(options);
        const auto backend = group.c10d()->getBackend(at::kCPU);
        const auto held = dynamic_cast<c10d::ProcessGroupGloo&>(*backend).getOptions();
        EXPECT_EQ(held->devices.size(), options.threads ? 2U : 3U);
        EXPECT_EQ(held->threads, options.threads.value_or(6));
        expect_sums(group, rank, n);
      }
    });
  }
}

TEST(GlooOptions, LazyRanksConnectAtTheFirstMessage) {
  expect_torch_ranks(8, "paceline", [](int rank, int n) {
    std::ptrdiff_t opened[2];
    for (const bool lazy : {false, true}) {
      const auto before = open_descriptors();
      const ProcessGroup group = over_gloo(GlooOptions{.lazy_init = lazy});
      opened[lazy ? 1 : 0] = open_descriptors() - before;
      expect_sums(group, rank, n);
    }
    EXPECT_LT(opened[1], opened[0]);
  });
}

TEST(GlooOptions, TheVariablesInterfacesCountWithoutOptions) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    ::setenv("GLOO_SOCKET_IFNAME", "lo", 1);
    expect_sums(over_gloo(), rank, n);
    ::setenv("GLOO_SOCKET_IFNAME", "lo,no-such-one", 1);
    EXPECT_THAT([] { over_gloo(); }, ThrowsMessage<Error>(HasSubstr("no-such-one")));
    expect_sums(over_gloo(GlooOptions{.interfaces = {"lo"}}), rank, n);
  });
}

TEST(GlooOptions, AreRefusedIfTheyCannotWork) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto refuses = [](const BackendOptions& options, const std::string& reason) {
      EXPECT_THAT([&] { over_gloo(options); }, ThrowsMessage<Error>(HasSubstr(reason)));
    };
    const std::string no_such_interface = "no interface 'no-such-one' with an address; its";
    refuses(PacelineOptions{}, "its backend is gloo");
    refuses(GlooOptions{.threads = 0}, "at least one is needed");
    refuses(GlooOptions{.interfaces = {"lo"}, .hostnames = {"localhost"}}, "either interfaces or");
    refuses(GlooOptions{.interfaces = {"no-such-one"}}, no_such_interface);
    refuses(GlooOptions{.hostnames = {"no-such-host.invalid"}}, "no-such-host.invalid");
    barrier();  // a rank that has left would be missing in the other's last group
  });
}

TEST(GlooOptions, AreOfAnEngineThatExists) {
  for (const char* const backend : {test::kAcrossNodes, "paceline"}) {
    const auto ends = test::run_torch_ranks(2, backend, [](const test::RankContext& context) {
      InitOptions init = context.init;
      init.backend_options = PacelineOptions{.engine = "infiniband"};
      EXPECT_THAT([&] { std::ignore = init_process_group(init); },
                  ThrowsMessage<UsageError>(HasSubstr("PacelineOptions::engine 'infiniband'")));
      return std::string();
    });
    for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  }
}

TEST(GlooOptions, ReachTheEngineBetweenNodes) {
  for (const bool exists : {true, false}) {
    const auto ends =
        test::run_torch_ranks(3, test::kAcrossNodes, [=](const test::RankContext& context) {
          InitOptions init = context.init;
          init.backend_options =
              PacelineOptions{.gloo = {.interfaces = {exists ? "lo" : "no-such-one"}}};
          if (exists) {
            const World world = init_process_group(init);
            expect_sums({}, context.rank, context.size);
          } else {
            EXPECT_THAT([&] { std::ignore = init_process_group(init); },
                        ThrowsMessage<Error>(HasSubstr("no-such-one")));
          }
          return std::string();
        });
    for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  }
}

TEST(GlooOptions, OfDifferentNumbersOfInterfacesAreRefused) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    if (rank == 0) {
      // Rank 0 waits for a rank that has refused.
      EXPECT_THROW(
          std::ignore = new_group({}, {.timeout = std::chrono::seconds(1),
                                       .backend = "gloo",
                                       .backend_options = GlooOptions{.interfaces = {"lo"}}}),
          Error);
    } else {
      EXPECT_THAT(
          [] {
            over_gloo(GlooOptions{.interfaces = {"lo", "lo"}});
          },
          ThrowsMessage<UsageError>(HasSubstr("rank 1 uses 2 interfaces and rank 0 1")));
    }
  });
}

}  // namespace
}  // namespace paceline
