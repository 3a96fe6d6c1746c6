#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/checkpoint_directory.h>
#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/log.h>
#include <paceline/reconfigure.h>

#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::expect_torch_ranks;
using test::names_in;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class CheckpointFailures : public ::testing::Test {
 protected:
  fs::path path() const { return directory_.path() / "run"; }
  double number_ = 1;
  const States states_{{"number", number_}};

 private:
  test::TemporaryDirectory directory_;
};

// The checkpoint before it stays, as the new one is none.
TEST_F(CheckpointFailures, ADirectoryThatRanksDoNotShareIsNamed) {
  for (const bool asynchronous : {false, true}) {
    expect_torch_ranks(2, "paceline", [&](int rank, int) {
      const fs::path shared = path() / fmt::format("shared-{}", asynchronous);
      const fs::path own = fs::path(shared).concat(fmt::format("-{}", rank));
      CheckpointDirectory(shared).save(1, states_);
      if (rank == 0) fs::rename(shared, own);
      CheckpointDirectory checkpoints(own, {.keep_last = 1, .asynchronous = asynchronous});
      const auto save = [&] {
        checkpoints.save(2, states_);
        checkpoints.wait();
      };
      EXPECT_THAT(save, ThrowsMessage<Error>(AllOf(
                            HasSubstr("the checkpoint of step 2 failed: rank 0: "),
                            HasSubstr("rank-1.json is not there, which rank 1 has written: all "
                                      "ranks must see the directory"))));
      EXPECT_EQ(names_in(own), rank == 0 ? std::vector<std::string>{"step-000000000001"}
                                         : std::vector<std::string>{});
    });
  }
}

// A file of the name that hides it while it is removed.
TEST_F(CheckpointFailures, AnOldOneThatCannotBeRemovedIsAWarning) {
  expect_torch_ranks(1, "paceline", [&](int, int) {
    std::vector<std::string> warnings;
    set_log_callback([&](LogLevel level, std::string_view text) {
      if (level == LogLevel::warning) warnings.emplace_back(text);
    });
    CheckpointDirectory checkpoints(path(), {.keep_last = 1});
    checkpoints.save(1, states_);
    std::ofstream(path() / ".step-000000000001.-old") << "x";
    checkpoints.save(2, states_);
    checkpoints.save(3, states_);
    EXPECT_THAT(names_in(path()),
                ElementsAre(".step-000000000001.-old", "step-000000000001", "step-000000000003"));
    EXPECT_THAT(warnings, ::testing::Each(HasSubstr("an old checkpoint cannot be removed: ")));
    EXPECT_EQ(warnings.size(), 2U);
    set_log_callback({});
    fs::remove(path() / ".step-000000000001.-old");
    checkpoints.save(4, states_);
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000004"));
  });
}

// Such as one of another user, who has made it read-only. Nothing of it is lost.
TEST_F(CheckpointFailures, AnOldOneThatIsProtectedKeepsItsName) {
  expect_torch_ranks(1, "paceline", [&](int, int) {
    CheckpointDirectory checkpoints(path(), {.keep_last = 1});
    checkpoints.save(1, states_);
    const fs::path old = path() / "step-000000000001";
    fs::permissions(old, fs::perms::owner_read | fs::perms::owner_exec);
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0) {
      fs::permissions(path().parent_path(), fs::perms::group_exec | fs::perms::others_exec,
                      fs::perm_options::add);
      EXPECT_EQ(::chown(old.c_str(), kNobody, -1), 0);
      EXPECT_EQ(::chown(path().c_str(), kNobody, -1), 0);
      ASSERT_EQ(::seteuid(kNobody), 0);
    }
    checkpoints.save(2, states_);
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000001", "step-000000000002"));
    EXPECT_TRUE(fs::exists(old / "rank-0.json"));
    fs::permissions(old, fs::perms::owner_all);
    checkpoints.save(3, states_);
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000003"));
  });
}

// The operating system resolves them, in this order.
TEST_F(CheckpointFailures, APathMayLeadThroughALinkAndUp) {
  fs::create_directories(path() / "data" / "runs");
  fs::create_directory_symlink(path() / "data" / "runs", path() / "link");
  expect_torch_ranks(1, "paceline", [&](int, int) {
    CheckpointDirectory checkpoints(path() / "link" / ".." / "new" / "one" / "");
    checkpoints.save(1, states_);
  });
  EXPECT_THAT(names_in(path() / "data" / "new" / "one"), ElementsAre("step-000000000001"));
}

// A program that ends by the exception has saved its last state.
TEST_F(CheckpointFailures, ASaveAfterOneThatFailedSavesAndThrows) {
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    bool fails = true;
    const auto get = [&]() -> at::IValue {
      return fails && rank == 1 ? at::IValue("\xff") : at::IValue(1);
    };
    const States states{{"own", {get, [](const at::IValue&) {}, Stateful::Scope::rank}}};
    CheckpointDirectory checkpoints(path(), {.asynchronous = true});
    checkpoints.save(1, states);  // the thread that writes finds what no file can contain
    fails = false;
    EXPECT_THAT([&] { checkpoints.save(2, states); },
                ThrowsMessage<Error>(AllOf(HasSubstr("the checkpoint of step 1 failed: rank 1: "),
                                           HasSubstr("; the checkpoint of step 2 is being "))));
    checkpoints.wait();
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000002"));
  });
}

// A world of 2 writes two parts, which do not make a checkpoint of 3 ranks.
TEST_F(CheckpointFailures, AfterAReconfigureOneIsConstructedAnew) {
  const auto ends = test::run_torch_ranks(3, "paceline", [&](const test::RankContext& context) {
    InitOptions init = context.init;
    init.enable_reconfigure = true;
    const World world = init_process_group(init);
    const auto form = [&](int uuid, int size) {
      const auto key = [&](int member) { return fmt::format("{} {}", uuid, member); };
      context.init.store->set(key(context.rank), get_reconfigure_handle());
      std::vector<std::string> handles;
      for (int member = 0; member < size; ++member) {
        handles.push_back(context.init.store->get_to_str(key(member)));
      }
      reconfigure(uuid, handles);
    };
    form(1, 3);
    CheckpointDirectory checkpoints(path(), {.keep_last = 1, .asynchronous = true});
    checkpoints.save(1, states_);
    checkpoints.wait();
    checkpoints.save(2, states_);
    if (context.rank == 2) return std::string();
    form(2, 2);
    const auto refuses = ThrowsMessage<UsageError>(HasSubstr(fmt::format(
        "on rank {} of 3 of a group that has ended or was reconfigured since; construct it anew",
        context.rank)));
    EXPECT_THAT([&] { checkpoints.save(3, states_); }, refuses);
    EXPECT_THAT([&] { checkpoints.wait(); }, refuses);
    EXPECT_THAT([&] { checkpoints.resume(states_); }, refuses);
    CheckpointDirectory again(path(), {.keep_last = 1});
    EXPECT_TRUE(again.resume(states_));
    again.save(3, states_);
    barrier();
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000003"));
    // Another process may have the other's place.
    form(3, 2);
    EXPECT_THAT(
        [&] {
          again.wait();
          again.save(4, states_);
        },
        ThrowsMessage<UsageError>(HasSubstr("was reconfigured since")));
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

// Each of them is new, with a slash at the end.
TEST_F(CheckpointFailures, ADirectoryIsMadeWithAllThatItIsIn) {
  expect_torch_ranks(1, "paceline", [&](int, int) {
    for (const std::string name : {"a/b/c", "d/e/", "./f//g/."}) {
      CheckpointDirectory checkpoints(path() / name);
      checkpoints.save(1, states_);
      EXPECT_EQ(checkpoints.resume(states_)->step, 1);
    }
    EXPECT_THAT(names_in(path()), ElementsAre("a", "d", "f"));
  });
}

}  // namespace
}  // namespace paceline
