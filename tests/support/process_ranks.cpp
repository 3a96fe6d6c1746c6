#include "support/process_ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <exception>

#include "base/errno_error.h"
#include "base/pipe.h"
#include "support/bootstrap_socket_pair.h"

namespace paceline::test {
namespace {

// Reads until the other end is closed. Returns false at the deadline.
bool read_all(int fd, const base::Deadline& deadline, std::string& text) {
  std::array<char, 4096> buffer{};
  for (;;) {
    pollfd readable{.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&readable, 1, static_cast<int>(deadline.remaining().count())) == 0) return false;
    const ssize_t count = ::read(fd, buffer.data(), buffer.size());
    if (count <= 0) return true;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

int failures() {
  const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  int count = 0;
  for (int i = 0; test != nullptr && i < test->result()->total_part_count(); ++i) {
    count += test->result()->GetTestPartResult(i).failed() ? 1 : 0;
  }
  return count;
}

std::string run_body(const std::function<std::string()>& body, bool& failed) {
  try {
    // Failures that the parent had when it forked do not count.
    const int before = failures();
    std::string report = body();
    failed = failures() > before;
    return report;
  } catch (const std::exception& error) {
    failed = true;
    return std::string("threw: ") + error.what();
  }
}

[[noreturn]] void be_rank(const std::function<std::string()>& body, int report) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  bool failed = false;
  const std::string text = run_body(body, failed);
  if (::write(report, text.data(), text.size()) < 0) failed = true;
  ::_exit(failed ? 1 : 0);
}

// Far longer than any body takes; the time limit of test programs is longer still.
constexpr std::chrono::minutes kLongestRun{5};

}  // namespace

std::vector<RankEnd> run_process_ranks(
    int size, const std::function<std::string(int, shm::BootstrapSockets)>& body) {
  const auto count = static_cast<std::size_t>(size);
  std::vector<BootstrapSocketPair> sockets(count);
  std::vector<base::Pipe> pipes(count);
  for (std::size_t rank = 1; rank < count; ++rank) sockets[rank] = make_bootstrap_sockets();
  for (auto& pipe : pipes) pipe = base::make_pipe();

  std::vector<pid_t> pids;
  for (std::size_t rank = 0; rank < count; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) throw base::errno_error("fork");
    if (pid == 0) {
      shm::BootstrapSockets mine;
      for (std::size_t other = 1; other < count; ++other) {
        if (rank == 0) mine.push_back(std::move(sockets[other].first));
        if (rank == other) mine.push_back(std::move(sockets[other].second));
      }
      const int report = pipes[rank].write_end.release();
      sockets.clear();
      pipes.clear();
      be_rank([&] { return body(static_cast<int>(rank), std::move(mine)); }, report);
    }
    pids.push_back(pid);
  }
  sockets.clear();
  std::vector<RankEnd> ends(count);
  for (auto& pipe : pipes) pipe.write_end.reset();
  const auto deadline = base::Deadline::after(kLongestRun);
  for (std::size_t rank = 0; rank < count; ++rank) {
    if (!read_all(pipes[rank].read_end.get(), deadline, ends[rank].report)) {
      ends[rank].report += "killed, since it did not end";
      ::kill(pids[rank], SIGKILL);
    }
    ::waitpid(pids[rank], &ends[rank].status, 0);
  }
  return ends;
}

void run_side_by_side(std::size_t count, const std::function<void(std::size_t)>& body) {
  expect_process_ranks(static_cast<int>(count),
                       [&](int number, const shm::BootstrapSockets& /*unused*/) {
                         body(static_cast<std::size_t>(number));
                       });
}

void expect_process_ranks(int size, const std::function<void(int, shm::BootstrapSockets)>& body) {
  const auto ends = run_process_ranks(size, [&](int rank, shm::BootstrapSockets sockets) {
    body(rank, std::move(sockets));
    return std::string();
  });
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].exited_cleanly())
        << "rank " << rank << " of " << size << ": " << ends[rank].report;
  }
}

}  // namespace paceline::test
