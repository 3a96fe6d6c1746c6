// Peers of paceline bench that misbehave: small programs stand for mpiexec and Python.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>

#include <paceline/error.h>

#include "base/cores.h"
#include "collectives/mpi_libraries.h"
#include "measure/external_peer.h"
#include "measure/pinned_thread.h"
#include "options.h"
#include "support/temporary_directory.h"

namespace paceline::bench {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::ThrowsMessage;

PeerProgram shell(const std::string& script) {
  return {"mpich", {"sh", "-c", script}, "choose another"};
}

TEST(ExternalPeer, AnswersEachOrder) {
  ExternalPeer peer(shell("while read n && [ $n != 0 ]; do echo $n 0.5; done"));
  for (const int calls : {3, 64, 7}) {
    const Sample sample = peer.measure(calls);
    EXPECT_EQ(sample.wall_us, calls);
    EXPECT_EQ(sample.cpu_us, 0.5);
  }
}

TEST(ExternalPeer, ReportsHowAProgramEnded) {
  const std::string ended = "mpich ended before its measurement";
  for (const auto& [script, end] :
       {std::pair{"read n; exit 3", "exited with code 3"},
        {"exec <&-; exit 0", "exited with code 0"},
        {"read n; echo 1 1; exit 4", "exited with code 4"},
        {"read n; kill -KILL $$", "killed by SIGKILL (often the kernel's out-of-memory killer)"}}) {
    ExternalPeer peer(shell(script));
    const auto measure_twice = [&] {
      peer.measure(1);
      peer.measure(1);
    };
    EXPECT_THAT(measure_twice, ThrowsMessage<Error>(ended + ": " + end + "; choose another"));
    EXPECT_THAT([&] { peer.measure(1); }, ThrowsMessage<Error>(ended + "; choose another"));
  }
}

TEST(ExternalPeer, ReportsAnAnswerOfTheWrongForm) {
  ExternalPeer peer(shell("read n; echo help; exit 0"));
  EXPECT_THAT([&] { peer.measure(1); },
              ThrowsMessage<Error>("mpich answered 'help' where two times were expected: exited "
                                   "with code 0; choose another"));
}

TEST(ExternalPeer, ReportsAProgramThatCannotStart) {
  EXPECT_THAT(
      [] {
        ExternalPeer({"mpich", {"/no/mpiexec"}, ""});
      },
      ThrowsMessage<Error>(HasSubstr("mpich: cannot start /no/mpiexec: No such file")));
}

// It ignores SIGTERM, too: this process's children inherit that.
TEST(ExternalPeer, KillsAProgramThatHangs) {
  const auto before = std::signal(SIGTERM, SIG_IGN);
  {
    ExternalPeer peer({"mpich", {"sleep", "1000"}, "choose another"}, 20ms);
    EXPECT_THAT([&] { peer.measure(1); },
                ThrowsMessage<Error>("mpich did not answer within 0.02 s; choose another"));
    const ExternalPeer never_asked({"mpich", {"sleep", "1000"}, ""}, 20ms);
  }
  std::signal(SIGTERM, before);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(PinnedThread, HasTheCoreOfItsRank) {
  const std::vector<int> cores = base::affinity();
  const auto ranks = static_cast<int>(cores.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const PinnedThread pinned(rank, ranks);
    EXPECT_THAT(base::affinity(), ElementsAre(cores[static_cast<std::size_t>(rank)]));
  }
  EXPECT_EQ(base::affinity(), cores);
}

TEST(PinnedThread, IsFreeIfRanksOutnumberCores) {
  const std::vector<int> cores = base::affinity();
  const PinnedThread pinned(0, static_cast<int>(cores.size()) + 1);
  EXPECT_THAT(base::affinity(), ElementsAreArray(cores));
}

TEST(MpiLibraries, AreAbsentUntilTheyAreFetched) {
  const test::TemporaryDirectory empty;
  for (const char* const library : kMpiLibraries) {
    EXPECT_THAT(why_absent(library, 1, empty.path()), HasSubstr("`make peers`")) << library;
  }
}

// Its ranks would wait for a time slice of the kernel's in each call: some 15 ms.
TEST(MpiLibraries, ThatDoNotYieldNeedACoreForEachRank) {
  const auto cores = static_cast<int>(base::affinity().size());
  EXPECT_THAT(why_absent("mpich", cores + 1), HasSubstr("its waits do not yield"));
  EXPECT_THAT(why_absent("openmpi", cores + 1), testing::Not(HasSubstr("yield")));
}

}  // namespace
}  // namespace paceline::bench
