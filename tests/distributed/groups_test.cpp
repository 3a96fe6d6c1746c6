// Groups beside the world, and groups that are destroyed before the world is.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/log.h>

#include "support/thoroughness.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using GroupsWorldsUpTo5 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, GroupsWorldsUpTo5, test::worlds({2, 3, 5}), test::CaseName());

TEST_P(GroupsWorldsUpTo5, CollectivesInvolveMembersOnly) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    const auto last_two = new_group({n - 1, n - 2});
    const auto everyone = new_group();
    EXPECT_EQ(get_rank(last_two), rank < n - 2 ? -1 : rank - (n - 2));
    EXPECT_EQ(get_world_size(last_two), rank < n - 2 ? -1 : 2);
    auto t = torch::full({3}, 1.0);
    all_reduce(t, {.group = last_two});
    EXPECT_EQ(t[0].item<double>(), rank < n - 2 ? 1 : 2);
    all_reduce(t.fill_(1), {.group = everyone});
    EXPECT_EQ(t[0].item<double>(), n);
    t.fill_(rank);
    broadcast(t, {.src = n - 1, .group = last_two});
    EXPECT_EQ(t[0].item<double>(), rank < n - 2 ? rank : n - 1);
    if (last_two.is_member()) {
      EXPECT_THROW(broadcast(t, {.src = n, .group = last_two}), UsageError);
    }
  });
}

// Programs call them in loops.
TEST(Groups, WarnOnceOfAnOperationOnANonMember) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    std::atomic<int> warnings = 0;
    set_log_callback([&](LogLevel level, std::string_view /*text*/) {
      if (level == LogLevel::warning) ++warnings;
    });
    const auto group = new_group({0});
    const auto x = torch::ones({1});
    for (int i = 0; i < 3; ++i) {
      all_reduce(x, {.group = group});
      barrier({.group = group});
    }
    set_log_callback({});
    EXPECT_EQ(warnings, rank == 0 ? 0 : 2);
  });
}

TEST(Groups, ARefusedCallOnOneRankLeavesLaterGroupsInStep) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    if (rank == 0) {
      EXPECT_THROW(static_cast<void>(new_group({}, {.timeout = std::chrono::milliseconds(0)})),
                   UsageError);
      EXPECT_THROW(static_cast<void>(new_group({}, {.backend = "none"})), UsageError);
    }
    auto t = torch::ones({1});
    all_reduce(t, {.group = new_group()});
    EXPECT_EQ(t[0].item<float>(), n);
  });
}

TEST(Groups, AMissingRankIsNamedWithItsGroup) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    if (rank == 0) {
      EXPECT_THAT(
          [] { static_cast<void>(new_group({}, {.timeout = std::chrono::milliseconds(100)})); },
          ThrowsMessage<Timeout>(AllOf(
              HasSubstr("rank 1 did not come to the rendezvous of group 1 within the timeout"),
              HasSubstr("all ranks of the world have to call new_group, in the same order"))));
    }
    barrier();
  });
}

TEST(Groups, DifferentListsOfRanksAreNamedAtOnce) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const std::vector<int> ranks = rank == 0 ? std::vector{0, 1} : std::vector{0, 1, 2};
    EXPECT_THAT([&] { static_cast<void>(new_group(ranks)); },
                ThrowsMessage<UsageError>(HasSubstr(
                    "the ranks disagree on the size of group 1: some were given 2 ranks, others "
                    "3. Give all ranks the same list of ranks")));
    barrier();
  });
}

using GroupsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, GroupsBackends, ::testing::ValuesIn(backends()), test::CaseName());

// The first rank to leave must not close the others' connections while they form the group.
TEST_P(GroupsBackends, MayBeDestroyedAtOnce) {
  for (int round = 0; round < 5; ++round) expect_torch_ranks(8, GetParam(), [](int, int) {});
}

// Gloo would wait for threads that the child does not have.
TEST_P(GroupsBackends, AForkedChildCannotUseThem) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    const ProcessGroup group = new_group();
    if (rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        int refused = 0;
        for (const auto& which : {ProcessGroup(), group}) {
          try {
            all_reduce(torch::ones({2}), {.group = which});
          } catch (const UsageError& error) {
            refused += std::string(error.what()).find("in a forked child") != std::string::npos;
          }
        }
        try {
          std::ignore = new_group();
        } catch (const UsageError&) {
          ++refused;
        }
        ::_exit(refused == 3 ? 0 : 1);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
    }
    all_reduce(torch::ones({2}), {.group = group});
    all_reduce(torch::ones({2}), {.group = new_group()});
  });
}

// Such as one of a data loader. It may have a connection's socket when another rank closes it.
TEST(Groups, AcrossNodesMayBeDestroyedBesideAChildProcess) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  const auto ends = test::run_torch_ranks(3, test::kAcrossNodes, [](const auto& context) {
    ::setenv("GROUP_RANK", std::to_string(context.rank).c_str(), 1);  // three nodes
    ::setenv("LOCAL_RANK", "0", 1);
    ::setenv("LOCAL_WORLD_SIZE", "1", 1);
    const World world = init_process_group(context.init);
    for (int round = 0; round < 25 * test::thoroughness(); ++round) {
      const ProcessGroup group = new_group();
      all_reduce(torch::ones({1000}), {.group = group});
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) ::pause();
      }
      barrier({.group = group});
      // It is never received.
      const auto sent = send_async(torch::ones({10}), (context.rank + 1) % 3, {.group = group});
      destroy_process_group(group);
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST(Groups, AcrossNodesGloosThreadsDoNotPreempt) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  expect_torch_ranks(2, test::kAcrossNodes, [](int, int) {
    int gloos = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(thread.path() / "comm"), name);
      const bool is_gloos = name == "gloo_tcp_loop";
      gloos += is_gloos ? 1 : 0;
      const pid_t id = std::stoi(thread.path().filename());
      // A thread keeps this policy if the one that starts it has it.
      if (is_gloos || id == ::getpid()) {
        EXPECT_EQ(::sched_getscheduler(id), is_gloos ? SCHED_BATCH : SCHED_OTHER) << name;
      }
    }
    EXPECT_GT(gloos, 0);
  });
}

TEST(Groups, SixtyFourAtOnceWork) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto descriptors = [] {
      return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    };
    const auto before = descriptors();
    std::vector<ProcessGroup> groups;
    for (int i = 0; i < 64; ++i) groups.push_back(new_group());
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 64; ++i) {
      tensors.push_back(torch::full({50'000}, static_cast<double>(i + rank)));
      works.push_back(
          all_reduce_async(tensors.back(), {.group = groups[static_cast<std::size_t>(i)]}));
    }
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i].wait();
      EXPECT_TRUE(tensors[i].eq(2.0 * static_cast<double>(i) + 1).all().item<bool>());
      const auto backend = groups[i].c10d()->getBackend(at::kCPU);
      EXPECT_LE(backend->getMemoryStats().at("staging_bytes"), std::uint64_t{64} << 20);
    }
    // A watch for the peer, what it watches this rank by, and the memory, on which both hold locks.
    EXPECT_LE(descriptors() - before, 64 * 3);
  });
}

TEST_P(GroupsBackends, AllocateRegisteredTensors) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    const bool shared = get_backend() == "paceline";
    const auto allocated = [&]() -> std::uint64_t {
      if (!shared) return 0;
      return ProcessGroup().c10d()->getBackend(at::kCPU)->getMemoryStats().at("allocated_bytes");
    };
    const auto before = allocated();
    at::Tensor t = allocate_tensor({3, 5000}, torch::kDouble);
    EXPECT_EQ(t.sizes(), at::IntArrayRef({3, 5000}));
    EXPECT_EQ(allocated() - before, shared ? 120'000u : 0u);
    t.fill_(rank);
    all_reduce(t);
    EXPECT_TRUE(t.eq(1).all().item<bool>());
    EXPECT_EQ(allocate_tensor({0}).numel(), 0);
    const auto format = torch::requires_grad().memory_format(at::MemoryFormat::ChannelsLast);
    at::Tensor leaf = allocate_tensor({2, 3, 4, 5}, format);
    EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
    EXPECT_TRUE(leaf.is_contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_THROW(static_cast<void>(allocate_tensor({-1})), std::exception);
    t.reset();
    leaf.reset();
    EXPECT_EQ(allocated(), before);
  });
}

TEST(Groups, SubgroupsAreTheRanksOfEachNode) {
  test::expect_torch_ranks(5, test::kAcrossNodes, [](int rank, int) {
    const auto nodes = topology();
    ASSERT_EQ(nodes.size(), 2);
    EXPECT_THAT(nodes[0].ranks, ElementsAre(0, 1, 2));
    EXPECT_THAT(nodes[1].ranks, ElementsAre(3, 4));
    EXPECT_FALSE(nodes[1].host.empty());
    const Subgroups groups = new_subgroups();
    ASSERT_EQ(groups.all.size(), 2);
    const auto sum = torch::full({1}, rank);
    all_reduce(sum, {.group = groups.current});
    EXPECT_EQ(sum.item<int>(), rank < 3 ? 3 : 7);
    EXPECT_EQ(groups.all[rank < 3 ? 1 : 0].is_member(), false);
  });
}

TEST(Groups, SubgroupsHaveTheGivenSize) {
  test::expect_torch_ranks(4, "paceline", [](int rank, int) {
    EXPECT_EQ(topology().size(), 1);
    EXPECT_EQ(get_world_size(new_subgroups().current), 4);
    const Subgroups groups = new_subgroups(2);
    EXPECT_EQ(groups.all.size(), 2);
    EXPECT_EQ(get_rank(groups.current), rank % 2);
    for (const int size : {0, -1, 3, 8}) {
      EXPECT_THAT([&] { return new_subgroups(size); },
                  ThrowsMessage<UsageError>(HasSubstr("it must divide the 4 ranks")));
    }
  });
}

TEST(Groups, UseTheGivenStagingBytes) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    constexpr std::size_t kBytes = std::size_t{64} << 10;
    const ProcessGroup group =
        new_group({}, {.backend_options = PacelineOptions{.staging_bytes = kBytes}});
    auto t = torch::full({100'000}, static_cast<double>(rank));
    all_reduce(t, {.group = group});
    EXPECT_TRUE(t.eq(1).all().item<bool>());
    const auto held = [](const ProcessGroup& of) {
      return of.c10d()->getBackend(at::kCPU)->getMemoryStats().at("staging_bytes");
    };
    EXPECT_EQ(held(group), kBytes);
    EXPECT_EQ(held(new_group()), held(ProcessGroup()));
    const auto wrong = [] { return new_group({}, {.backend_options = GlooOptions{}}); };
    EXPECT_THAT(wrong, ThrowsMessage<UsageError>(HasSubstr("its backend is paceline")));
  });
}

long entries_of(const std::string& directory) {
  return std::distance(std::filesystem::directory_iterator(directory),
                       std::filesystem::directory_iterator());
}

// A line of /proc/self/status, in KiB.
long status_of(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return std::stol(line.substr(name.size() + 1));
  }
  return -1;
}

TEST(Groups, HundredsDestroyedLeakNothing) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer keeps memory that is freed";
  constexpr int kFirst = 200;
  const int groups = 800 * test::thoroughness();
  expect_torch_ranks(2, "paceline", [&](int, int) {
    rlimit files{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = 256;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
    long descriptors = 0, threads = 0, space = 0, memory = 0;
    for (int i = 0; i < groups; ++i) {
      const ProcessGroup group = new_group();
      const auto t = torch::ones({1000});
      all_reduce_async(t, {.group = group}).wait();
      ASSERT_EQ(t[999].item<float>(), 2);
      destroy_process_group(group);
      if (i != kFirst) continue;
      descriptors = entries_of("/proc/self/fd");
      threads = entries_of("/proc/self/task");
      space = status_of("VmSize");
      memory = status_of("VmRSS");
    }
    EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
    EXPECT_EQ(entries_of("/proc/self/task"), threads);
    EXPECT_LT(status_of("VmSize") - space, 64 << 10);  // one group alone has 2x RAM
    // Each of the 600 has 16 pages of staging buffers at least, 37 MiB in all.
    EXPECT_LT(status_of("VmRSS") - memory, 16 << 10);
  });
}

TEST(Groups, RejectCallsAfterDestruction) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const ProcessGroup group = new_group();
    const auto t = torch::ones({1});
    all_reduce_async(t, {.group = group}).wait();
    const auto backend = group.c10d()->getBackend(at::kCPU);
    destroy_process_group();
    std::vector<at::Tensor> tensors{t};
    for (const bool async : {false, true}) {
      EXPECT_THAT([&] { backend->allreduce(tensors, {.asyncOp = async}); },
                  ThrowsMessage<UsageError>(HasSubstr("which this rank has left")));
    }
  });
}

using DestroyedGroupsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DestroyedGroupsBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(DestroyedGroupsBackends, RejectCallsAndOthersGoOn) {
  expect_torch_ranks(3, GetParam(), [&](int rank, int) {
    const ProcessGroup kept = new_group();
    const ProcessGroup pair = new_group({0, 2});
    auto t = torch::ones({4});
    if (pair.is_member()) all_reduce(t, {.group = pair});
    EXPECT_EQ(t[0].item<float>(), rank == 1 ? 1 : 2);
    destroy_process_group(pair);
    if (pair.is_member()) {
      for (const std::function<void()>& use : std::vector<std::function<void()>>{
               [&] { all_reduce(t, {.group = pair}); },
               [&] { static_cast<void>(all_reduce_async(t, {.group = pair})); },
               [&] { static_cast<void>(get_rank(pair)); },
               [&] { static_cast<void>(get_world_size(pair)); },
               [&] { static_cast<void>(get_backend(pair)); },
               [&] {
                 const DistributedDataParallel model(torch::nn::Linear(2, 2),
                                                     {.process_group = pair});
               },
               [&] { destroy_process_group(pair); }}) {
        EXPECT_THAT(use,
                    ThrowsMessage<UsageError>(HasSubstr("destroy_process_group has ended it")));
      }
    }
    for (const ProcessGroup& group : {kept, ProcessGroup()}) {
      t.fill_(1);
      all_reduce(t, {.group = group});
      EXPECT_EQ(t[0].item<float>(), 3);
    }
    destroy_process_group({});
    EXPECT_FALSE(is_initialized());
    destroy_process_group(kept);  // as the world before it
  });
}

TEST_P(DestroyedGroupsBackends, RejectStepsOfTheirModels) {
  expect_torch_ranks(2, GetParam(), [&](int, int) {
    const ProcessGroup group = new_group();
    DistributedDataParallel model(torch::nn::Linear(2, 2), {.process_group = group});
    const auto step = [&] { model(torch::ones({1, 2})).sum().backward(); };
    // The buckets are put in order in the second.
    for (int i = 0; i < 4; ++i) step();
    destroy_process_group(group);
    EXPECT_THROW(step(), UsageError);
  });
}

TEST(Groups, DestroyRejectsGroupsNotMadeByNewGroup) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto world = ProcessGroup().c10d();
    const auto made = c10::make_intrusive<c10d::ProcessGroup>(world->getStore(), 0, 1);
    const ProcessGroup others(made);
    EXPECT_THAT([&] { destroy_process_group(others); },
                ThrowsMessage<UsageError>(HasSubstr("that new_group did not make")));
    destroy_process_group(ProcessGroup(world));
    EXPECT_FALSE(is_initialized());
  });
}

TEST(Groups, AnswerForAGivenGroupWithoutAWorld) {
  const ProcessGroup given(c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::HashStore>(), /*rank=*/2, /*size=*/3));
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(get_rank(given), 2);
  EXPECT_EQ(get_world_size(given), 3);
}

TEST(Groups, TensorsAndWorksOutliveThem) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const ProcessGroup group = new_group();
    DistributedDataParallel model(torch::nn::Linear(100, 200), {.process_group = group});
    const auto input = torch::ones({1, 100});
    for (int step = 0; step < 3; ++step) model(input).sum().backward();
    const auto backend = group.c10d()->getBackend(at::kCPU);
    const at::Tensor lent = backend->allocateTensor(1000, at::kFloat);
    lent.fill_(rank + 1);
    const auto t = torch::ones({100'000});
    Work work = all_reduce_async(t, {.group = group});
    Work reduced = all_reduce_async(lent, {.group = group});
    destroy_process_group(group);  // waits for them
    EXPECT_TRUE(work.is_completed() && reduced.is_completed());
    work.wait();
    reduced.wait();
    EXPECT_EQ(t.sum().item<float>(), 200'000);
    EXPECT_EQ(lent.sum().item<float>(), 3'000);
    EXPECT_EQ(model.parameters()[1].grad()[0].item<float>(), 3);
    EXPECT_THAT([&] { model(input).sum().backward(); },
                ThrowsMessage<UsageError>(HasSubstr("group 1")));
    EXPECT_EQ(model.parameters()[1].grad().numel(), 200);
    barrier();
  });
}

// A future's callback runs on a thread that destroying the group waits for.
TEST(Groups, CallbacksMayUseTheApiDuringDestruction) {
  expect_torch_ranks(2, "paceline", [](int, int size) {
    ProcessGroup group = new_group();
    std::vector<at::Tensor> tensors{torch::ones({1000})};
    std::atomic<int> seen = 0;
    {
      auto backend = group.c10d()->getBackend(at::kCPU);
      backend->allreduce(tensors, {.asyncOp = true})->getFuture()->addCallback([&](auto&) {
        seen = get_world_size();
      });
    }
    destroy_process_group(group);
    EXPECT_EQ(seen, size);
  });
}

}  // namespace
}  // namespace paceline
