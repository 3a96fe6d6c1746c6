#include "internode/connect_leaders.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/error.h>
#include <paceline/version.h>

#include "base/address.h"
#include "base/unique_fd.h"
#include "internode/link_messages.h"
#include "net/secure_channel.h"
#include "support/eventually.h"

namespace paceline::internode {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Between threads of this process.
class Blackboard {
 public:
  explicit Blackboard(int size) : blobs_(static_cast<std::size_t>(size)) {}

  class Rank final : public shm::Exchange {
   public:
    Rank(Blackboard& board, int rank) : board_(board), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(board_.blobs_.size()); }
    std::vector<std::string> all_gather(const std::string& blob,
                                        const base::Deadline& /*deadline*/) override {
      std::unique_lock lock(board_.mutex_);
      board_.blobs_[static_cast<std::size_t>(rank_)] = blob;
      ++board_.given_;
      board_.changed_.notify_all();
      board_.changed_.wait(lock, [&] { return board_.given_ == size(); });
      return board_.blobs_;
    }

   private:
    Blackboard& board_;
    int rank_;
  };

  // All blobs, once there are so many.
  std::vector<std::string> read() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return given_ == static_cast<int>(blobs_.size()); });
    return blobs_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> blobs_;
  int given_ = 0;
};

NodeMap map_of(int nodes, int node) {
  std::vector<int> ranks;
  for (int rank = 0; rank < nodes; ++rank) ranks.push_back(rank);
  return {ranks, node};
}

// One rank on each node.
NodeLinks::Connections connect(
    Blackboard& board, int nodes, int node, std::chrono::milliseconds timeout = 1min,
    const std::function<void()>& check_peers = [] {}) {
  Blackboard::Rank exchange(board, node);
  const NodeMap map = map_of(nodes, node);
  return connect_leaders(exchange, map,
                         {.group = "test", .host = "127.0.0.1", .check_peers = check_peers},
                         base::Deadline::after(timeout));
}

base::UniqueFd connect_to(int port) {
  const base::Address address = base::resolve("127.0.0.1", port).front();
  base::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), address.data(), address.size()), 0);
  return socket;
}

int port_in(const std::string& blob) {
  return std::stoi(blob.substr(0, blob.find(' ')));
}

TEST(ConnectLeaders, ConnectsEachNodeToEachOther) {
  constexpr int kNodes = 4;
  Blackboard board(kNodes);
  std::vector<NodeLinks::Connections> links(kNodes);
  std::vector<std::thread> threads;
  for (int node = 0; node < kNodes; ++node) {
    threads.emplace_back(
        [&, node] { links[static_cast<std::size_t>(node)] = connect(board, kNodes, node); });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t a = 0; a < kNodes; ++a) {
    for (std::size_t b = 0; b < kNodes; ++b) {
      EXPECT_EQ(links[a][b].connection != nullptr, a != b);
      if (a != b) links[a][b].connection->send("from " + std::to_string(a));
    }
  }
  for (std::size_t a = 0; a < kNodes; ++a) {
    for (std::size_t b = 0; b < kNodes; ++b) {
      if (a == b) continue;
      std::vector<std::string> messages;
      while (messages.empty() && !links[a][b].connection->loss()) messages = links[a][b].receive();
      EXPECT_THAT(messages, ElementsAre("from " + std::to_string(b)));
    }
  }
}

// What came before.
class Given final : public shm::Exchange {
 public:
  Given(int rank, std::vector<std::string> blobs) : rank_(rank), blobs_(std::move(blobs)) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(blobs_.size()); }
  std::vector<std::string> all_gather(const std::string& /*blob*/,
                                      const base::Deadline& /*deadline*/) override {
    return blobs_;
  }

 private:
  int rank_;
  std::vector<std::string> blobs_;
};

// What a leader that knows the secret sends to another one than that which gets it now.
std::string recorded(const net::Key& key) {
  net::SecureChannel leader(key, net::SecureChannel::Side::connecting);
  net::SecureChannel other(key, net::SecureChannel::Side::accepting);
  leader.send(encode(Hello{kVersion, "test", 1}));
  std::string sent = leader.take_output();
  other.receive(sent);
  leader.receive(other.take_output());
  return sent + leader.take_output();
}

// Also while a leader connects.
TEST(ConnectLeaders, TenThousandHostileAttemptsChangeNothing) {
  constexpr int kAttempts = 10'000;
  constexpr int kBefore = 5'000;
  Blackboard board(2);
  NodeLinks::Connections first;
  std::thread one([&] { first = connect(board, 2, 0); });
  Blackboard::Rank(board, 1).all_gather("1 - 127.0.0.1", base::Deadline::after(1min));
  const auto blobs = board.read();
  std::istringstream words(blobs.front());
  int port = 0;
  std::string secret;
  words >> port >> secret;

  net::SecureChannel liar(net::make_key("another secret"), net::SecureChannel::Side::connecting);
  const std::string greeting = liar.take_output();
  const std::vector<std::string> attempts{
      "",
      "GET / HTTP/1.1\r\n\r\n",
      std::string(70'000, '\0'),
      greeting,
      greeting + std::string(4, '\xff'),
      recorded(net::make_key("another secret")),
      recorded(net::make_key(secret)),
  };
  constexpr std::size_t kMostOpen = 600;  // half-open: they say no more
  std::deque<base::UniqueFd> open;
  const auto attempt = [&](int number) {
    base::UniqueFd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const base::Address address = base::resolve("127.0.0.1", port).front();
    // The leaders may have met.
    if (::connect(stranger.get(), address.data(), address.size()) != 0) return;
    const auto& text = attempts[static_cast<std::size_t>(number) % attempts.size()];
    static_cast<void>(::send(stranger.get(), text.data(), text.size(), MSG_NOSIGNAL));
    if (text.empty() || text == greeting) open.push_back(std::move(stranger));
    if (open.size() > kMostOpen) open.pop_front();
  };
  for (int i = 0; i < kBefore; ++i) attempt(i);
  NodeLinks::Connections second;
  std::thread other([&] {
    Given exchange(1, blobs);
    second = connect_leaders(exchange, map_of(2, 1), {.group = "test", .host = "127.0.0.1"},
                             base::Deadline::after(20s));
  });
  for (int i = kBefore; i < kAttempts; ++i) attempt(i);
  other.join();
  one.join();
  EXPECT_TRUE(first[1].connection->authenticated());
  EXPECT_TRUE(second[0].connection->authenticated());
}

// A node that gives its address and does not come.
TEST(ConnectLeaders, NamesALeaderThatDoesNotConnect) {
  Blackboard board(2);
  std::thread silent([&] {
    Blackboard::Rank exchange(board, 1);
    exchange.all_gather("1 - 127.0.0.1", base::Deadline::after(1min));
    // Whoever gets the port alone knows nothing that helps.
    const auto stranger = connect_to(port_in(board.read().front()));
    static_cast<void>(::send(stranger.get(), "paceline channel 1\n", 19, MSG_NOSIGNAL));
  });
  try {
    connect(board, 2, 0, 500ms);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Timeout& timeout) {
    EXPECT_THAT(timeout.what(),
                AllOf(HasSubstr("rank 1 did not connect to the leader of node 0 within 0.5 s")));
    EXPECT_THAT(timeout.ranks(), ElementsAre(1));
  }
  silent.join();
}

// The ranks in the failure that the other end of the link reports.
shm::RankSet ranks_in_failure(NodeLinks::Link& link) {
  shm::RankSet ranks;
  EXPECT_TRUE(test::eventually([&] {
    for (const std::string& text : link.receive()) {
      const auto message = decode_link_message(text);
      const auto* const failed = message ? std::get_if<Failed>(&*message) : nullptr;
      if (failed != nullptr) ranks = failed->failure.ranks;
    }
    return !ranks.empty() || link.connection->loss();
  }));
  return ranks;
}

// The node's leader learns it at any moment before it is connected to all others.
TEST(ConnectLeaders, AllLearnThatARankOfOneNodeIsLost) {
  constexpr int kNodes = 3;
  for (int failing = 0; failing < kNodes; ++failing) {
    for (int moment = 0; moment < 8; ++moment) {
      SCOPED_TRACE(fmt::format("node {} after {} turns", failing, moment));
      Blackboard board(kNodes);
      std::atomic<bool> failed = false;
      std::latch over(1);
      std::vector<shm::RankSet> learnt(kNodes, shm::RankSet{});
      std::vector<std::thread> threads;
      for (int node = 0; node < kNodes; ++node) {
        threads.emplace_back([&, node] {
          int turns = 0;
          const auto check_peers = [&] {
            if (node != failing || turns++ < moment) return;
            failed = true;
            throw PeerLost("rank 7 was lost", {7}, "connect", 0);
          };
          shm::RankSet& ranks = learnt[static_cast<std::size_t>(node)];
          try {
            auto links = connect(board, kNodes, node, 1min, check_peers);
            if (node == failing) return over.count_down();
            over.wait();
            if (failed) ranks = ranks_in_failure(links[static_cast<std::size_t>(failing)]);
          } catch (const PeerLost& lost) {
            ranks = shm::RankSet(lost.ranks());
            if (node == failing) over.count_down();
          }
        });
      }
      for (auto& thread : threads) thread.join();
      for (const shm::RankSet& ranks : learnt) {
        EXPECT_EQ(ranks, failed ? shm::RankSet{7} : shm::RankSet());
      }
    }
  }
}

// A leader made by hand, connected to node 0 only.
std::unique_ptr<net::Connection> greet_node_0(Blackboard& board, const Hello& hello) {
  Blackboard::Rank(board, hello.node).all_gather("1 - 127.0.0.1", base::Deadline::after(1min));
  std::istringstream words(board.read().front());
  int port = 0;
  std::string secret;
  words >> port >> secret;
  auto link = std::make_unique<net::Connection>(connect_to(port), net::make_key(secret),
                                                net::SecureChannel::Side::connecting, "process");
  link->send(encode(hello));
  return link;
}

// Node 2 reaches node 0, and is lost before it reaches node 1.
TEST(ConnectLeaders, ALeaderThatHasMetAllReportsALossToTheOthers) {
  Blackboard board(3);
  std::latch over(1);
  std::thread first([&] {
    const auto links = connect(board, 3, 0);
    const shm::Failure failure{shm::FailureKind::peer_lost, {2}, "rank 2 was lost"};
    links[1].connection->send(encode(Failed{failure}));
    over.wait();
  });
  std::thread third([&] {
    const auto link = greet_node_0(board, {kVersion, "test", 2});
    while (link->receive().empty() && !link->loss()) std::this_thread::yield();
    over.wait();
  });
  std::string lost;
  try {
    connect(board, 3, 1, 10s);
  } catch (const PeerError& error) {
    lost = error.what();
  }
  EXPECT_THAT(lost, HasSubstr("rank 2 was lost"));
  over.count_down();
  first.join();
  third.join();
}

// Node 1 has another version, which node 0 sees first.
TEST(ConnectLeaders, AllLearnThatALeaderHasFailedByItself) {
  Blackboard board(3);
  std::string first;
  std::thread zero([&] {
    try {
      connect(board, 3, 0);
    } catch (const Error& error) {
      first = error.what();
    }
  });
  std::vector<std::string> heard;
  std::thread one([&] {
    const auto link = greet_node_0(board, {"0.0.1", "test", 1});
    while (heard.size() < 2 && !link->loss()) {
      for (auto& text : link->receive()) heard.push_back(std::move(text));
      std::this_thread::yield();
    }
  });
  shm::RankSet blamed;
  std::string second;
  try {
    connect(board, 3, 2);
  } catch (const PeerLost& lost) {
    blamed = shm::RankSet(lost.ranks());
    second = lost.what();
  }
  zero.join();
  one.join();
  const std::string problem =
      fmt::format("node 1 runs Paceline 0.0.1, and node 0 {}: all nodes need the same", kVersion);
  EXPECT_EQ(first, problem);
  EXPECT_EQ(blamed, shm::RankSet{0});
  EXPECT_THAT(second, HasSubstr("rank 0 failed while the group was being formed: " + problem));
  ASSERT_EQ(heard.size(), 2u);
  const auto greeting = decode_link_message(heard[0]);
  EXPECT_TRUE(greeting && std::get<Hello>(*greeting).version == kVersion);
  EXPECT_TRUE(std::holds_alternative<Failed>(decode_link_message(heard[1]).value()));
}

TEST(ConnectLeaders, RefusesAnAddressThatIsNone) {
  for (const std::string blob : {"", "29500", "x - host", "0 - host", "70000 - host"}) {
    Blackboard board(2);
    std::thread other([&] {
      Blackboard::Rank exchange(board, 1);
      exchange.all_gather(blob, base::Deadline::after(1min));
    });
    EXPECT_THAT(
        [&] { connect(board, 2, 0); },
        ::testing::ThrowsMessage<Error>(HasSubstr("is not the address of a node's leader")));
    other.join();
  }
}

}  // namespace
}  // namespace paceline::internode
