// The error of a rank without descriptors or address space, and the errors of the others.

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "shm/collectives/group.h"
#include "support/process_ranks.h"
#include "support/shared.h"
#include "support/thoroughness.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kElements = 100'000;

// Lets one rank live on until the others have ended, so that its end tells them nothing.
class Last {
 public:
  Last(int size, int rank) : others_(size - 1), rank_(rank) {}
  std::string outlive(int rank, std::string report) {
    if (rank != rank_) ++*ended_;
    while (rank == rank_ && *ended_ < others_) ::sched_yield();
    return report;
  }

 private:
  int others_;
  int rank_;
  test::Shared<std::atomic<int>> ended_;
};

// Forms a group and uses it; what went wrong, or nothing.
std::string use(int rank, int size, BootstrapSockets sockets,
                std::size_t arena_bytes = test::small_region().arena_bytes) {
  try {
    RegionOptions options = test::small_region(std::chrono::seconds(20));
    options.arena_bytes = arena_bytes;
    const auto region = Region::create(std::move(sockets), rank, size, options);
    Group group(region);
    auto* const data = static_cast<float*>(region->allocate_or_throw(kElements * sizeof(float)));
    std::fill_n(data, kElements, 1.0f);
    group.all_reduce(data, data, kElements, DataType::float32, ReduceOp::sum);
    EXPECT_EQ(data[kElements - 1], static_cast<float>(size));
    region->memory().free(data);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

void limit(decltype(RLIMIT_AS) resource, rlim_t most) {
  rlimit now{};
  ASSERT_EQ(::getrlimit(resource, &now), 0);
  now.rlim_cur = most;
  ASSERT_EQ(::setrlimit(resource, &now), 0);
}

// No more descriptors than these can be opened from now on.
void limit_descriptors(rlim_t more) {
  const int next = ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
  ::close(next);
  limit(RLIMIT_NOFILE, static_cast<rlim_t>(next) + more);
}

// Whether the victim had enough; if not, it says what it lacks, and the others that they miss it.
bool had_enough(const std::vector<test::RankEnd>& ends, int victim, const std::string& complaint) {
  const bool enough = ends[static_cast<std::size_t>(victim)].report.empty();
  for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    if (enough) {
      EXPECT_EQ(end.report, "");
    } else {
      EXPECT_THAT(end.report,
                  HasSubstr(rank == victim ? complaint : fmt::format("rank {} was lost", victim)));
    }
  }
  return enough;
}

TEST(Resources, EveryRankReportsALackOfDescriptors) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer needs them itself";
  constexpr int kSize = 3;
  for (const int victim : {0, 2}) {
    rlim_t more = 0;
    const auto run = [&] {
      Last last(kSize, victim);
      return test::run_process_ranks(kSize, [&](int rank, BootstrapSockets sockets) {
        if (rank == victim) limit_descriptors(more);
        return last.outlive(rank, use(rank, kSize, std::move(sockets)));
      });
    };
    while (!had_enough(run(), victim, "(EMFILE); raise the limit with ulimit -n")) {
      ASSERT_LT(++more, 40u);
    }
    EXPECT_GT(more, 3u);
  }
}

TEST(Resources, EveryRankReportsALackOfAddressSpace) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer needs it itself";
  constexpr int kSize = 3;
  for (const int victim : {0, 2}) {
    Last last(kSize, victim);
    const auto ends = test::run_process_ranks(kSize, [&](int rank, BootstrapSockets sockets) {
      if (rank == victim) limit(RLIMIT_AS, rlim_t{2} << 30);
      return last.outlive(rank, use(rank, kSize, std::move(sockets), std::size_t{1} << 30));
    });
    EXPECT_FALSE(
        had_enough(ends, victim,
                   " bytes of shared memory: Cannot allocate memory (ENOMEM); address space is "
                   "limited to 2097152 KiB, raise the limit with ulimit -v"));
  }
}

TEST(Resources, EveryRankReportsThatFilesMayNotBeSoLarge) {
  constexpr int kSize = 3;
  const auto ends = test::run_process_ranks(kSize, [&](int rank, BootstrapSockets sockets) {
    if (rank == 0) limit(RLIMIT_FSIZE, rlim_t{1} << 20);  // which makes the memory
    return use(rank, kSize, std::move(sockets));
  });
  EXPECT_FALSE(
      had_enough(ends, 0, "files are limited to 1024 KiB, raise the limit with ulimit -f"));
}

// Of a user's descriptors that are on their way there may be as many as a process may have open.
TEST(Resources, BootstrapWaitsWhileTooManyDescriptorsAreInFlight) {
  constexpr int kSize = 16;
  constexpr uid_t kNobody = 65534;
  const auto ends = test::run_process_ranks(kSize, [](int rank, BootstrapSockets sockets) {
    limit(RLIMIT_NOFILE, 100);  // 15 ranks get 17 each
    EXPECT_TRUE(::geteuid() != 0 || ::setresuid(kNobody, kNobody, kNobody) == 0);
    return use(rank, kSize, std::move(sockets));
  });
  for (const auto& end : ends) EXPECT_EQ(end.report, "");
}

// The kernel takes no credentials of a user who has no number there.
TEST(Resources, WorksInANamespaceWithoutMappedUsers) {
  constexpr int kSize = 3;
  for (const std::vector<int>& inside :
       {std::vector<int>{0}, std::vector<int>{2}, std::vector<int>{0, 1, 2}}) {
    const auto ends =
        test::run_process_ranks(kSize, [&](int rank, BootstrapSockets sockets) -> std::string {
          const bool enters = std::ranges::find(inside, rank) != inside.end();
          if (enters && ::unshare(CLONE_NEWUSER) != 0) return "skipped";
          return use(rank, kSize, std::move(sockets));
        });
    if (ends[static_cast<std::size_t>(inside.front())].report == "skipped") {
      GTEST_SKIP() << "not allowed to make a user namespace";
    }
    for (const auto& end : ends) EXPECT_EQ(end.report, "");
  }
}

TEST(Resources, WorksWithoutDevShm) {
  constexpr int kSize = 2;
  const auto ends =
      test::run_process_ranks(kSize, [](int rank, BootstrapSockets sockets) -> std::string {
        if (::unshare(CLONE_NEWNS) != 0 ||
            ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
            ::mount("none", "/dev/shm", "tmpfs", MS_RDONLY, "size=4096") != 0) {
          return "skipped";
        }
        return use(rank, kSize, std::move(sockets));
      });
  for (const auto& end : ends) {
    if (end.report == "skipped") GTEST_SKIP() << "not allowed to mount";
    EXPECT_EQ(end.report, "");
  }
}

}  // namespace
}  // namespace paceline::shm
