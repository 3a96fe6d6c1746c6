// Nodes that look for each other, and what else comes to the coordinator.
#include <gmock/gmock.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <optional>
#include <utility>

#include "nodes/session_fixture.h"

namespace paceline::nodes {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Nodes that have been accepted wait as long as it takes, whatever limit an answer has.
TEST_F(Session, WaitsLongerThanForAnAnswer) {
  std::vector<SessionOptions> all{options(0, 3), options(1, 3), options(2, 3)};
  for (auto& one : all) one.answer_limit = 1s;  // a busy machine may take some of it for an answer
  std::thread late([&] {
    std::this_thread::sleep_for(1500ms);  // the time that has to pass
    NodeSession session = make(all[2]);
    EXPECT_EQ(describe(*session.await_start()), "2/3 ranks from 3 of 6 restart 0 job 127.0.0.1");
    session.await_verdict(ended(3));
  });
  const auto ends = run({all[0], all[1]}, [&](NodeSession& session, int node) {
    const auto start = session.await_start();
    session.await_verdict(ended(node + 1));
    return describe(*start);
  });
  late.join();
  EXPECT_THAT(ends, ElementsAre("0/3 ranks from 0 of 6 restart 0 job 127.0.0.1",
                                "1/3 ranks from 1 of 6 restart 0 job 127.0.0.1"));
}

TEST_F(Session, WaitsForAHostThatHasNoAddressYet) {
  auto second = options(1, 2);
  second.host = "no-such-host.invalid";
  second.rules.join_timeout = 300ms;
  NodeSession session = make(second);
  try {
    session.await_start();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot resolve no-such-host.invalid"));
  }
}

// Something that accepts connections and closes them: a proxy whose server does not run.
TEST_F(Session, DoesNotConnectAgainAndAgainWithoutPause) {
  net::Listener proxy(base::resolve("127.0.0.1", port_.port()).front());
  std::atomic<bool> done = false;
  int connections = 0;
  std::thread serve_none([&] {
    while (!done) {
      pollfd ready{proxy.fd(), POLLIN, 0};
      if (::poll(&ready, 1, 10) > 0 && proxy.accept()) ++connections;
    }
  });
  auto second = options(1, 2);
  second.rules.join_timeout = 300ms;
  NodeSession session = make(second);
  EXPECT_THROW(session.await_start(), Error);
  done = true;
  serve_none.join();
  EXPECT_LE(connections, 2);
}

// The launcher of an earlier job may end at that moment, or may have stopped waiting for this one.
TEST_F(Session, TriesAgainIfItsConnectionIsClosedOnce) {
  std::thread others([&] {
    {
      net::Listener listener(base::resolve("127.0.0.1", port_.port()).front());
      pollfd ready{listener.fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&ready, 1, -1), 1);
      net::Connection closing(*listener.accept(), net::make_key("a secret of the test"),
                              net::SecureChannel::Side::accepting, "launcher");
      while (!closing.greeted()) closing.receive();
    }
    NodeSession first = make(options(0, 2));
    EXPECT_EQ(first.await_start()->nodes, 2);
    first.await_verdict(ended(1));
  });
  NodeSession second = make(options(1, 2));
  EXPECT_EQ(second.await_start()->nodes, 2);
  second.await_verdict(ended(2));
  others.join();
}

TEST_F(Session, DoesNotSayThatALauncherWhichGaveUpHasAnotherSecret) {
  NodeSession first = make(options(0, 2));
  {
    base::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const base::Address address = base::resolve("127.0.0.1", port_.port()).front();
    ASSERT_EQ(::connect(socket.get(), address.data(), address.size()), 0);
    net::Connection giving_up(std::move(socket), net::make_key("a secret of the test"),
                              net::SecureChannel::Side::connecting, "launcher");
    while (!giving_up.greeted()) {
      first.receive();
      giving_up.receive();
    }
  }
  std::thread others([&] {
    NodeSession second = make(options(1, 2));
    second.await_start();
    second.await_verdict(ended(2));
  });
  EXPECT_EQ(first.await_start()->nodes, 2);
  first.await_verdict(ended(1));
  others.join();
  EXPECT_THAT(printed(), Not(HasSubstr("refused")));
}

TEST_F(Session, RefusesNodesThatDoNotFit) {
  std::vector<SessionOptions> all(9, options(1, 2));
  all[0] = options(0, 2);
  all[1].key = net::make_key("the secret of another job");
  all[2].join.job = "other";
  all[3].join.version = "0.0.1";
  all[4].join.node = 2;
  all[5].join.max_nodes = 3;
  all[6].join.node.reset();
  all[7].join.max_restarts = 3;
  all[8].join.tolerate_loss = true;
  std::atomic<int> refused = 0;
  std::atomic<bool> all_refused = false;
  const auto ends = run(all, [&](NodeSession& session, int node) {
    if (node != 0) {
      try {
        session.await_start();
      } catch (const Error& error) {
        if (++refused == 8) all_refused = true;
        return std::string(error.what());
      }
      return std::string("accepted");
    }
    while (!all_refused) serve(session);
    return std::string("undisturbed");
  });
  EXPECT_EQ(ends[0], "undisturbed");
  EXPECT_THAT(ends[1], HasSubstr("it has another secret, or is not Paceline's"));
  EXPECT_THAT(ends[2], HasSubstr("the job 'job' meets there, and not 'other'"));
  EXPECT_THAT(ends[3], HasSubstr("install the same version on all nodes"));
  EXPECT_THAT(ends[4], HasSubstr("--node-rank 2, but the job has 2 nodes"));
  EXPECT_THAT(ends[5], HasSubstr("--nnodes 2:3 here and 2 on node 0"));
  EXPECT_THAT(ends[6], HasSubstr("--rdzv-backend c10d here and static on node 0"));
  EXPECT_THAT(ends[7], HasSubstr("--max-restarts (or PET_MAX_RESTARTS) is 3 here and 0 on node 0"));
  EXPECT_THAT(ends[8], HasSubstr("--tolerate-loss here and not on node 0"));
  EXPECT_THAT(printed(), HasSubstr("paceline: refused a launcher at 127.0.0.1, with the error: "));
  // The node that was refused for its secret said nothing else.
  EXPECT_THAT(printed(), HasSubstr("paceline: refused a launcher at 127.0.0.1, which does not know "
                                   "the secret of this job"));
}

TEST_F(Session, RefusesASecondNodeOfTheSameNumber) {
  std::atomic<int> refused = 0;
  const auto ends =
      run({options(0, 2), options(1, 2), options(1, 2)}, [&](NodeSession& session, int node) {
        try {
          session.await_start();
          while (refused == 0) serve(session);  // the job must not be over before
          session.await_verdict(ended(node == 0 ? 1 : 2));
          return std::string("accepted");
        } catch (const Error& error) {
          ++refused;
          return std::string(error.what());
        }
      });
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(ends[0], "accepted");
  EXPECT_THAT(ends[1] + ends[2],
              AllOf(HasSubstr("accepted"), HasSubstr("node 1 is taken by host1: give each node its "
                                                     "own --node-rank")));
}

TEST_F(Session, IsNotDisturbedByStrangers) {
  std::vector<base::UniqueFd> strangers;
  NodeSession first = make(options(0, 2));
  for (int i = 0; i < 100; ++i) {
    base::UniqueFd& socket =
        strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const base::Address address = base::resolve("127.0.0.1", port_.port()).front();
    ASSERT_EQ(::connect(socket.get(), address.data(), address.size()), 0);
    const std::string text = i % 10 == 0 ? "GET / HTTP/1.0\r\n\r\n" : "";
    ASSERT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    first.receive();
  }
  const auto begin = std::chrono::steady_clock::now();
  std::thread second([&] {
    NodeSession session = make(options(1, 2));
    session.await_start();
    session.await_verdict(ended(2));
  });
  EXPECT_EQ(first.await_start()->nodes, 2);
  // Before those that say nothing are dropped.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 8s);
  EXPECT_EQ(first.await_verdict(ended(1)).exit_code, 0);
  second.join();
  for (const base::UniqueFd& socket : strangers) {
    std::array<char, 64> bytes{};
    EXPECT_LE(::recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT), 0);
  }
}

TEST_F(Session, GivesUpOnAWorldThatNeverFills) {
  std::vector<SessionOptions> all{options(0, 3), options(1, 3)};
  all[0].rules.join_timeout = 300ms;
  const auto ends = run(all, [&](NodeSession& session, int) {
    EXPECT_FALSE(session.await_start());
    return fmt::format("{} {}", session.verdict().exit_code, session.verdict().report);
  });
  EXPECT_THAT(ends, Each(fmt::format("1 paceline: only 2 of 3 nodes have come (host0, host1), not "
                                     "node 2 within 0.3 s: start the same command there, with its "
                                     "--node-rank, and see that it reaches 127.0.0.1:{} (only this "
                                     "machine reaches it; give another by --master-addr or "
                                     "--rdzv-endpoint)\n",
                                     port_.port())));
}

TEST_F(Session, GivesUpOnACoordinatorThatNeverComes) {
  auto second = options(1, 2);
  second.rules.join_timeout = 300ms;
  NodeSession session = make(second);
  try {
    session.await_start();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(),
              fmt::format("no launcher answered at 127.0.0.1:{} (only this machine reaches it; "
                          "give another by --master-addr or --rdzv-endpoint) "
                          "within 0.3 s: Connection refused (ECONNREFUSED); start node 0 too, and "
                          "see that this is its address in the network",
                          port_.port()));
  }
}

TEST_F(Session, NamesATakenPort) {
  const net::Listener other(base::resolve("127.0.0.1", port_.port()).front());
  try {
    make(options(0, 2));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("127.0.0.1:"), HasSubstr("another job using the port")));
  }
}

// As after the end of an earlier job; or two launchers began to listen in the same moment.
TEST_F(Session, CoordinatesOnceThePortIsFree) {
  SessionOptions own = options(0, 1, false);
  own.coordinates.reset();
  auto other = std::make_optional<net::Listener>(base::resolve("127.0.0.1", port_.port()).front());
  NodeSession session = make(own);
  EXPECT_THAT(printed(), HasSubstr("another launcher here may be node 0"));
  other.reset();
  EXPECT_EQ(session.await_start()->node, 0);
}

// Of launchers without numbers on the endpoint's machine, the first is the coordinator.
TEST_F(Session, FindsTheCoordinatorByItsAddress) {
  std::vector<SessionOptions> all(3, options(0, 3, false));
  for (auto& one : all) one.coordinates.reset();
  std::mutex mutex;
  std::vector<int> nodes;
  run(all, [&](NodeSession& session, int) {
    const int node = session.await_start()->node;
    session.await_verdict(ended(1));
    const std::lock_guard lock(mutex);
    nodes.push_back(node);
    return std::string();
  });
  EXPECT_THAT(nodes, testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_THAT(printed(), HasSubstr("waits for 3 nodes at 127.0.0.1:"));
}

TEST_F(Session, NamesAHostThatCannotBeResolved) {
  for (const bool numbered : {true, false}) {
    auto first = options(0, 2, numbered);
    if (!numbered) first.coordinates.reset();
    first.host = "no-such-host.invalid";
    first.rules.join_timeout = 300ms;
    NodeSession session = make(first);
    try {
      session.await_start();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("cannot resolve no-such-host.invalid: "),
                        HasSubstr(" within 0.3 s; see that --master-addr or --rdzv-endpoint is")));
    }
    EXPECT_THAT(printed(), HasSubstr("waiting for an address\n"));
  }
}

TEST_F(Session, SaysThatNoInterfaceHasItsAddress) {
  auto first = options(0, 2);
  first.host = "192.0.2.1";
  make(first);
  EXPECT_THAT(printed(), HasSubstr(fmt::format("waits for 2 nodes at 0.0.0.0:{}, as no interface "
                                               "here has 192.0.2.1 (is this machine node 0, and "
                                               "the address right?)",
                                               port_.port())));
}

}  // namespace
}  // namespace paceline::nodes
