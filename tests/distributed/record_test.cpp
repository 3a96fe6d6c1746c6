// The error files that `record` leaves for the launcher, when ranks go on after a failure.

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/record.h>

#include "base/pipe.h"
#include "base/unique_fd.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ErrorFiles : public ::testing::Test {
 protected:
  // What a launcher tells a rank that it starts.
  void set_variables(const RankContext& context) const {
    ::setenv("RANK", std::to_string(context.rank).c_str(), 1);
    ::setenv("WORLD_SIZE", std::to_string(context.size).c_str(), 1);
    ::setenv("TORCHELASTIC_ERROR_FILE", path(context.rank).c_str(), 1);
  }
  std::string path(int rank) const { return directory_.path() / fmt::format("rank{}.json", rank); }
  std::string read(int rank) const {
    std::ifstream file(path(rank));
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  const test::TemporaryDirectory directory_;
};

TEST_F(ErrorFiles, BlameTheRankThatWasLost) {
  test::run_torch_ranks(3, "paceline", [&](const RankContext& context) {
    set_variables(context);
    const int code = record([&] {
      const World world = init_process_group(context.init);
      barrier();
      if (context.rank == 1) ::raise(SIGKILL);
      barrier();
    });
    return std::to_string(code);
  });
  for (const int rank : {0, 2}) EXPECT_THAT(read(rank), HasSubstr(R"("blamed_ranks":[1])"));
}

// Rank 1 leaves in good order. In the world of the others rank 2 has the number 1, which the
// launcher would take for the rank that has left.
TEST_F(ErrorFiles, BlameNobodyByTheNumbersOfAWorldThatSurvivorsFormed) {
  test::run_torch_ranks(3, "paceline", [&](const RankContext& context) {
    set_variables(context);
    const int code = record([&] {
      {
        const World world = init_process_group(context.init);
        barrier();
      }
      if (context.rank == 1) return;
      auto again = context.init;
      again.world_size = 2;
      again.rank = context.rank == 2 ? 1 : 0;
      const World world = init_process_group(again);
      barrier();
      if (context.rank == 2) ::raise(SIGKILL);
      barrier();
    });
    return std::to_string(code);
  });
  EXPECT_THAT(read(0), AllOf(HasSubstr("rank 1"), Not(HasSubstr("blamed_ranks"))));
}

TEST_F(ErrorFiles, AreInMemoryIfTheyCannotBeWritten) {
  const base::UniqueFd memory(::memfd_create("paceline-error", 0));
  const auto in_memory = [&] {
    std::ifstream file(fmt::format("/proc/self/fd/{}", memory.get()));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto ends = test::run_torch_ranks(1, "paceline", [&](const RankContext& context) {
    set_variables(context);
    ::setenv("TORCHELASTIC_ERROR_FILE", "/nonexistent/error.json", 1);
    ::setenv("PACELINE_ERROR_FD", std::to_string(memory.get()).c_str(), 1);
    EXPECT_EQ(record([] { throw std::runtime_error("the disk is full"); }), 1);
    EXPECT_THAT(in_memory(), HasSubstr(R"("message":"the disk is full")"));
    EXPECT_EQ(record([] {}), 0);
    EXPECT_EQ(in_memory(), "");
    return std::string();
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
}

// A child that the rank forks has its error file, too.
TEST_F(ErrorFiles, AreNotOfChildrenThatARankForks) {
  const auto ends = test::run_torch_ranks(1, "paceline", [&](const RankContext& context) {
    set_variables(context);
    pid_t child = -1;
    const int code = record([&] {
      child = ::fork();
      if (child == 0) throw std::runtime_error("the child fails");
    });
    if (child == 0) ::_exit(code);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 1);
    return std::string();
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  EXPECT_EQ(read(0), "");
}

TEST_F(ErrorFiles, NameTheTypeOfAnExceptionWithoutText) {
  test::run_torch_ranks(2, "paceline", [&](const RankContext& context) {
    set_variables(context);
    const int code = record([&] {
      const World world = init_process_group(context.init);
      if (context.rank == 1) throw std::runtime_error("");
      barrier();
    });
    return std::to_string(code);
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(read(rank), HasSubstr("std::runtime_error without a text"));
  }
}

TEST_F(ErrorFiles, GoWhenTheRankTriesAgain) {
  const auto ends = test::run_torch_ranks(1, "paceline", [&](const RankContext& context) {
    set_variables(context);
    EXPECT_EQ(record([] { throw std::runtime_error("the disk is full"); }), 1);
    EXPECT_THAT(read(0), HasSubstr("the disk is full"));
    EXPECT_EQ(record([&] { EXPECT_EQ(read(0), ""); }), 0);
    return std::string();
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  EXPECT_FALSE(std::filesystem::exists(path(0)));
}

// The rank would otherwise wait for its reader, also within a wait that has a deadline.
TEST(LogOnStderr, IsDroppedIfNobodyReadsTheStream) {
  const auto ends = test::run_torch_ranks(1, "paceline", [](const RankContext&) {
    const base::Pipe unread = base::make_pipe();
    const int fd = unread.write_end.get();
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    const std::vector<char> bytes(4096);
    while (::write(fd, bytes.data(), bytes.size()) > 0) {
    }
    ::fcntl(fd, F_SETFL, 0);
    ::dup2(fd, STDERR_FILENO);
    ::setenv("TORCH_WORKER_SERVER_SOCKET", "/nowhere/socket", 1);  // which record warns of
    bool ran = false;
    EXPECT_EQ(record([&] { ran = true; }), 0);
    EXPECT_TRUE(ran);
    EXPECT_EQ(::fcntl(STDERR_FILENO, F_GETFL) & O_NONBLOCK, 0);
    return std::string();
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
}

}  // namespace
}  // namespace paceline
