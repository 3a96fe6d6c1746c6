#include "internode/remote_messages.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "internode/nodes_of_threads.h"
#include "support/eventually.h"

namespace paceline::internode {
namespace {

using namespace std::chrono_literals;
using shm::DataType;
using test::EngineNetwork;
using test::global_rank_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A message of this thread, which waits for it.
class Waited {
 public:
  using Post = std::shared_ptr<RemoteMessages::Request> (RemoteMessages::*)(
      const RemoteMessages::Message&, std::shared_ptr<const void>, RemoteMessages::Done);

  Waited(RemoteMessages& messages, Post post, const RemoteMessages::Message& message)
      : messages_(messages) {
    request_ = (messages.*post)(message, nullptr, [this](std::exception_ptr error) {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      done_ = true;
      changed_.notify_all();
    });
  }
  void wait() {
    const auto awaiting = messages_.awaiting(*request_);
    awaiting->show();
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, 10ms, [&] { return done_; })) {
      lock.unlock();
      messages_.check(*request_);
      lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  RemoteMessages& messages_;
  std::shared_ptr<RemoteMessages::Request> request_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool done_ = false;
};

std::vector<std::exception_ptr> run(
    const std::function<void(RemoteMessages&, Group&, int peer)>& body,
    const std::vector<int>& nodes = {0, 1},
    const std::function<void(EngineNetwork&)>& prepare = [](EngineNetwork&) {}) {
  EngineNetwork network;
  EngineNetwork between;
  prepare(between);
  return test::run_on_nodes(nodes, network, [&](Group& group) {
    RemoteMessages messages(group.region(), group.global_ranks(), group.rank(),
                            between.engine(group.rank()));
    body(messages, group, 1 - group.rank());
    group.barrier();
  });
}

void expect_success(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Every rank throws an E that names this one.
template <typename E>
void expect_all_name(const std::vector<std::exception_ptr>& errors, int rank,
                     const ::testing::Matcher<std::string>& text) {
  for (const auto& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const E& thrown) {
      EXPECT_THAT(thrown.what(), text);
      EXPECT_THAT(thrown.ranks(), ElementsAre(rank));
    }
  }
}

RemoteMessages::Message message_of(std::vector<float>& data, int peer, int tag,
                                   std::chrono::milliseconds timeout = 1min) {
  return {data.data(), data.size(), DataType::float32, peer, tag, timeout};
}

TEST(RemoteMessages, ArriveByTagAndInOrder) {
  expect_success(run([](RemoteMessages& messages, Group&, int peer) {
    for (const std::size_t count : {0, 1, 1000}) {
      std::vector<std::vector<float>> sent;
      std::vector<std::vector<float>> received(6, std::vector<float>(count));
      for (int i = 0; i < 6; ++i) sent.emplace_back(count, static_cast<float>(10 * peer + i));
      std::vector<std::unique_ptr<Waited>> all;
      for (std::size_t i = 0; i < sent.size(); ++i) {
        all.push_back(std::make_unique<Waited>(messages, &RemoteMessages::send,
                                               message_of(sent[i], peer, static_cast<int>(i / 2))));
      }
      // The tags in another order; messages of one tag come in the order in which they were sent.
      for (const std::size_t i : {4, 5, 0, 1, 2, 3}) {
        all.push_back(
            std::make_unique<Waited>(messages, &RemoteMessages::receive,
                                     message_of(received[i], peer, static_cast<int>(i / 2))));
      }
      for (auto one = all.rbegin(); one != all.rend(); ++one) (*one)->wait();
      for (int i = 0; i < 6; ++i) {
        EXPECT_THAT(received[static_cast<std::size_t>(i)],
                    ::testing::Each(static_cast<float>(10 * (1 - peer) + i)));
      }
    }
  }));
}

TEST(RemoteMessages, KeepNoMemoryOnceTheyHaveArrived) {
  expect_success(run([](RemoteMessages& messages, Group&, int peer) {
    auto memory = std::make_shared<std::vector<float>>(1000);
    const std::weak_ptr<void> kept = memory;
    std::promise<void> done;
    const auto post = peer == 1 ? &RemoteMessages::send : &RemoteMessages::receive;
    const auto message = message_of(*memory, peer, 3);
    const auto request = (messages.*post)(message, std::move(memory),
                                          [&](const std::exception_ptr&) { done.set_value(); });
    done.get_future().wait();
    EXPECT_TRUE(test::eventually([&] { return kept.expired(); }));
  }));
}

TEST(RemoteMessages, OfDifferentSizesAreAMismatch) {
  const auto errors = run([](RemoteMessages& messages, Group& group, int peer) {
    std::vector<float> data(group.rank() == 0 ? 3 : 4);
    Waited one(messages, group.rank() == 0 ? &RemoteMessages::send : &RemoteMessages::receive,
               message_of(data, peer, 7));
    one.wait();
  });
  expect_all_name<Mismatch>(
      errors, 100,
      HasSubstr("rank 100 on node 0 sent 3 float32 with tag 7 to rank 101 on node 1, "
                "which received 4 float32"));
}

TEST(RemoteMessages, ATimeoutNamesTheRankThatDidNotSend) {
  const auto errors = run([](RemoteMessages& messages, Group& group, int peer) {
    std::vector<float> data(4);
    if (group.rank() == 0) return;  // into the barrier
    Waited one(messages, &RemoteMessages::receive, message_of(data, peer, 0, 200ms));
    one.wait();
  });
  expect_all_name<Timeout>(
      errors, 100,
      HasSubstr("rank 100 on node 0 did not send to rank 101 on node 1 "
                "within the timeout of 0.2 s: recv of 4 float32 from rank 100 on node 0"));
}

// Rank 0 sends nothing. Ranks 1 and 2 are on one node, and wait for others in a row with rank 3.
TEST(RemoteMessages, ATimeoutNamesTheRankThatAllWaitFor) {
  const auto errors = run(
      [](RemoteMessages& messages, Group& group, int /*peer*/) {
        std::vector<float> data(4);
        const int rank = group.rank();
        if (rank == 0) return;  // into the barrier
        const auto others_wait = [&] {
          const shm::Region& region = *group.region();
          return region.awaited_by(103) == 102 && region.awaited_by(102) == 100;
        };
        if (rank == 1) {
          EXPECT_TRUE(test::eventually(others_wait));
        }
        const int peer = rank == 1 ? 3 : rank == 3 ? 2 : 0;
        Waited one(messages, &RemoteMessages::receive,
                   message_of(data, peer, 0, rank == 1 ? 50ms : 1min));
        one.wait();
      },
      {0, 1, 1, 2});
  expect_all_name<Timeout>(
      errors, 100,
      AllOf(HasSubstr("rank 103 on node 2 did not send to rank 101 on node 1 within"),
            HasSubstr("; rank 103 waits for rank 102; rank 102 waits for rank 100")));
}

TEST(RemoteMessages, ATimeoutOfRanksThatWaitForEachOtherSaysSo) {
  const auto errors = run([](RemoteMessages& messages, Group& group, int peer) {
    std::vector<float> data(4);
    const bool is_first = group.rank() == 0;
    const auto is_known = [&] { return group.region()->awaited_by(101) == 100; };
    if (is_first) {
      EXPECT_TRUE(test::eventually(is_known));
    }
    Waited one(messages, &RemoteMessages::receive,
               message_of(data, peer, 0, is_first ? 50ms : 1min));
    one.wait();
  });
  for (const auto& error : errors) {
    EXPECT_THAT([&] { std::rethrow_exception(error); },
                ::testing::ThrowsMessage<Timeout>(
                    HasSubstr("; rank 101 waits for rank 100; they wait for each other: send")));
  }
}

TEST(RemoteMessages, EndWithTheGroup) {
  const auto errors = run([](RemoteMessages& messages, Group& group, int peer) {
    std::vector<float> data(4);
    Waited one(messages, &RemoteMessages::receive, message_of(data, peer, 0));
    if (group.rank() == 0) group.region()->abort("enough");
    one.wait();
  });
  for (const auto& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const PeerLost& lost) {
      EXPECT_THAT(lost.what(), HasSubstr("enough"));
    }
  }
}

TEST(RemoteMessages, EndWithAnErrorIfTheirRankLeaves) {
  expect_success(run([](RemoteMessages& messages, Group&, int peer) {
    std::vector<float> data(4);
    Waited one(messages, &RemoteMessages::receive, message_of(data, peer, 0));
    messages.close();
    EXPECT_THAT([&] { one.wait(); }, ::testing::ThrowsMessage<UsageError>(
                                         HasSubstr("left group test before its message")));
  }));
}

TEST(RemoteMessages, OfAnEndedRequestTheEngineKeepsTheMemoryOnly) {
  expect_success(run([](RemoteMessages& messages, Group&, int peer) {
    auto data = std::make_shared<std::vector<float>>(4);
    const auto message = message_of(*data, peer, 0);
    auto held = std::make_shared<int>();
    const std::weak_ptr<std::vector<float>> is_kept = data;
    const std::weak_ptr<int> is_held = held;
    messages.receive(
        message, std::move(data),
        [held = std::move(held)](const std::exception_ptr& error) { EXPECT_TRUE(error); });
    messages.close();
    EXPECT_FALSE(is_kept.expired());
    EXPECT_TRUE(is_held.expired());
  }));
}

TEST(RemoteMessages, CloseWaitsUntilEveryDoneIsDestroyed) {
  expect_success(run([](RemoteMessages& messages, Group&, int peer) {
    // Closing may end the send before the engine has carried it.
    const auto sent = std::make_shared<std::vector<float>>(4);
    std::vector<float> received(4);
    std::promise<void> called;
    std::promise<void> closed;
    std::future<void> is_closed = closed.get_future();
    auto held = std::make_shared<int>();
    const std::weak_ptr<int> is_held = held;
    messages.receive(message_of(received, peer, 0), nullptr,
                     [&, held = std::move(held)](const std::exception_ptr& error) {
                       called.set_value();
                       EXPECT_FALSE(error);
                       EXPECT_EQ(is_closed.wait_for(100ms), std::future_status::timeout);
                     });
    messages.send(message_of(*sent, peer, 0), sent, [](auto) {});
    called.get_future().wait();
    messages.close();
    EXPECT_TRUE(is_held.expired());
    closed.set_value();
  }));
}

// By which of the two ranks can start a transfer for the header only.
TEST(RemoteMessages, BlameTheRankThatCannotGoOnAfterTheHeader) {
  for (const int limited : {0, 1}) {
    const auto errors = run(
        [](RemoteMessages& messages, Group& group, int peer) {
          std::vector<float> data(4);
          Waited one(messages, group.rank() == 0 ? &RemoteMessages::send : &RemoteMessages::receive,
                     message_of(data, peer, 0));
          one.wait();
        },
        {0, 1}, [&](EngineNetwork& between) { between.limit(limited, 1); });
    expect_all_name<PeerLost>(errors, global_rank_of(limited),
                              AllOf(HasSubstr(fmt::format("rank {0} on node {1} cannot go on with",
                                                          100 + limited, limited)),
                                    HasSubstr("no thread is left")));
  }
}

// Its engine closes no connection.
TEST(RemoteMessages, FailIfTheirRankHasLeft) {
  for (const bool sends : {false, true}) {
    const auto errors = run([&](RemoteMessages& messages, Group& group, int peer) {
      if (group.rank() == 1) return group.region()->depart();
      std::vector<float> data(4);
      Waited one(messages, sends ? &RemoteMessages::send : &RemoteMessages::receive,
                 message_of(data, peer, 0, 10s));
      one.wait();
    });
    EXPECT_THAT([&] { std::rethrow_exception(errors[0]); },
                ::testing::ThrowsMessage<PeerLost>(
                    HasSubstr("rank 101 on node 1 has left the group and is missing in")));
  }
}

TEST(RemoteMessages, RefuseTagsThatEnginesCannotCarry) {
  expect_success(run([](RemoteMessages& messages, Group&, int peer) {
    std::vector<float> data(4);
    for (const int tag : {-1, RemoteMessages::kTags}) {
      EXPECT_THAT([&] { messages.send(message_of(data, peer, tag), nullptr, [](auto) {}); },
                  ::testing::ThrowsMessage<UsageError>(HasSubstr("tags are from 0 to")));
    }
  }));
}

}  // namespace
}  // namespace paceline::internode
