#include "internode/connect_leaders.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/error.h>
#include <paceline/version.h>

#include "base/address.h"
#include "base/parse.h"
#include "internode/link_messages.h"
#include "net/connection.h"
#include "net/connector.h"
#include "net/listener.h"
#include "net/secure_channel.h"

namespace paceline::internode {
namespace {

using namespace std::chrono_literals;
using net::SecureChannel;

constexpr const char* kOwner = "process";
constexpr auto kPause = 200ms;
// At most this many unauthenticated peers are heard at a time. A new one replaces the oldest; a
// leader that was replaced connects again. So silent peers cannot keep leaders out.
constexpr std::size_t kMaxStrangers = 64;

// In the exchange, before an encoded Failed.
constexpr std::string_view kFailed = "failed ";
// How long a leader that has failed waits for others to hear it: in the exchange, and once all know
// each other's addresses.
constexpr auto kReportLimit = 5s;
constexpr auto kFarewell = 1s;

void throw_if_failed(const std::optional<LinkMessage>& message) {
  const auto* const failed = message ? std::get_if<Failed>(&*message) : nullptr;
  if (failed != nullptr) shm::throw_failure(failed->failure, {"connect", 0});
}

// What a leader tells the others in the exchange: "PORT SECRET HOST", with node 0's secret.
struct Endpoint {
  int port = 0;
  std::string secret;
  std::string host;

  std::string encode() const { return fmt::format("{} {} {}", port, secret, host); }
  // Throws the failure if that is what it is.
  static Endpoint decode(const std::string& text) {
    if (text.starts_with(kFailed)) {
      throw_if_failed(decode_link_message(std::string_view(text).substr(kFailed.size())));
    }
    const std::size_t first = text.find(' ');
    const std::size_t second = text.find(' ', first + 1);
    Endpoint endpoint;
    const auto port = base::parse_number(text.substr(0, first), 1, 65535);
    if (!port || second == std::string::npos) {
      throw Error(fmt::format("\"{:.60}\" is not the address of a node's leader", text));
    }
    endpoint.port = *port;
    endpoint.secret = text.substr(first + 1, second - first - 1);
    endpoint.host = text.substr(second + 1);
    return endpoint;
  }
};

// Connects to the leaders of lower nodes, and accepts the connections of higher ones.
class Meeting {
 public:
  Meeting(const NodeMap& map, const LeaderOptions& options, net::Listener listener)
      : map_(map),
        options_(options),
        listener_(std::move(listener)),
        links_(static_cast<std::size_t>(map.nodes())),
        connectors_(links_.size()),
        present_(links_.size(), false),
        greeting_(encode(Hello{kVersion, options.group, map.node()})) {
    present_[static_cast<std::size_t>(map.node())] = true;
  }

  void begin(std::vector<Endpoint> endpoints) {
    endpoints_ = std::move(endpoints);
    key_ = net::make_key(endpoints_[0].secret);
    for (std::size_t node = 0; node < static_cast<std::size_t>(map_.node()); ++node) {
      connect_to(node, 0ms);
    }
  }

  bool complete() const {
    return std::ranges::all_of(present_, [](bool here) { return here; });
  }

  void advance(const base::Deadline& deadline) {
    wait(deadline);
    for (std::size_t node = 0; node < connectors_.size(); ++node) connect(node);
    for (std::size_t node = 0; node < links_.size(); ++node) {
      NodeLinks::Link& link = links_[node];
      if (link.connection && !present_[node]) {
        hear(node);
      } else if (link.connection) {
        keep(link);
      }
    }
    hear_strangers();
    accept();
  }

  NodeLinks::Connections take() { return std::move(links_); }

  // The others would wait for this leader. They throw its failure instead.
  void report(const shm::Failure& failure) noexcept {
    try {
      greeting_ = encode(Failed{failure});
      failed_ = true;
      for (const auto& link : links_) {
        if (link.connection) link.connection->send(greeting_);
      }
      const auto deadline = base::Deadline::after(kFarewell);
      while (!deadline.expired() && !(complete() && is_flushed())) advance(deadline);
    } catch (const std::exception&) {
      // The others learn it at their timeout.
    }
  }

  [[noreturn]] void fail(const base::Deadline& deadline) const {
    shm::RankSet late;
    std::string why;
    for (std::size_t node = 0; node < present_.size(); ++node) {
      if (present_[node]) continue;
      late.insert(options_.ranks.of(map_.leader_of(static_cast<int>(node))));
      const auto& connector = connectors_[node];
      if (connector && !connector->last_failure().empty()) why = "; " + connector->last_failure();
    }
    shm::throw_failure({shm::FailureKind::timeout, late,
                        fmt::format("{} did not connect to the leader of node {} within {} s{}",
                                    options_.ranks.describe_global(late), map_.node(),
                                    static_cast<double>(deadline.budget().count()) / 1000, why)},
                       {"connect", 0});
  }

 private:
  using Connection = net::Connection;

  bool is_flushed() const {
    return std::ranges::none_of(
        links_, [](const auto& link) { return link.connection && link.connection->pending(); });
  }

  void wait(const base::Deadline& deadline) const {
    std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
    auto pause = std::min(deadline.remaining(), 50ms);  // then check_peers is asked again
    for (const auto& connector : connectors_) {
      if (!connector) continue;
      connector->add_to(fds);
      pause = std::min(pause, connector->deadline().remaining());
    }
    for (const NodeLinks::Link& link : links_) {
      if (link.connection) link.connection->add_to(fds);
    }
    for (const auto& stranger : strangers_) stranger->add_to(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(pause.count()));
  }

  void connect_to(std::size_t node, std::chrono::milliseconds pause) {
    connectors_[node].emplace(endpoints_[node].host, endpoints_[node].port, pause);
  }

  void connect(std::size_t node) {
    if (!connectors_[node] || links_[node].connection) return;
    auto socket = connectors_[node]->advance();
    if (!socket) return;
    links_[node].connection = std::make_unique<Connection>(std::move(*socket), key_,
                                                           SecureChannel::Side::connecting, kOwner);
    links_[node].connection->send(greeting_);
  }

  void accept() {
    for (std::size_t i = 0; i < kMaxStrangers; ++i) {
      auto socket = listener_.accept();
      if (!socket) return;
      if (strangers_.size() == kMaxStrangers) strangers_.pop_front();
      strangers_.push_back(std::make_unique<Connection>(std::move(*socket), key_,
                                                        SecureChannel::Side::accepting, kOwner));
    }
  }

  // What a leader that is present sends is for its link. But one that has met all others may learn
  // that a leader is lost which this one still waits for.
  void keep(NodeLinks::Link& link) const {
    link.received = link.receive();  // which sends, too
    if (failed_) return;
    for (const std::string& text : link.received) throw_if_failed(decode_link_message(text));
  }

  // The connected leader answers with its own Hello. keep() takes what follows.
  void hear(std::size_t node) {
    auto& [connection, received] = links_[node];
    received = connection->receive();
    if (!received.empty()) {
      if (!failed_) check_version(hello_of(received.front(), static_cast<int>(node)));
      received.erase(received.begin());
      present_[node] = true;
    } else if (connection->loss() && failed_) {
      present_[node] = true;  // it has heard the failure
    } else if (connection->loss()) {
      // A stranger may have had the port before.
      connection.reset();
      connect_to(node, kPause);
    }
  }

  void hear_strangers() {
    for (auto& stranger : std::exchange(strangers_, {})) {
      auto messages = stranger->receive();
      if (!messages.empty()) {
        take_in({std::move(stranger), std::move(messages)});
      } else if (!stranger->loss()) {
        strangers_.push_back(std::move(stranger));
      }
    }
  }

  void take_in(NodeLinks::Link link) {
    Hello hello;
    try {
      hello = hello_of(link.received.front(), std::nullopt);
    } catch (const PeerError&) {
      if (failed_) return;
      throw;
    }
    const auto node = static_cast<std::size_t>(hello.node);
    link.received.erase(link.received.begin());
    link.connection->send(greeting_);
    links_[node] = std::move(link);
    present_[node] = true;
    if (!failed_) check_version(hello);  // the other leader does it, too, with this one's greeting
  }

  // The sender knows the secret. Throws its failure.
  Hello hello_of(const std::string& text, std::optional<int> node) const {
    const auto message = decode_link_message(text);
    throw_if_failed(message);
    const auto* const hello = message ? std::get_if<Hello>(&*message) : nullptr;
    const bool valid = hello != nullptr && hello->group == options_.group && hello->node >= 0 &&
                       hello->node < map_.nodes() && hello->node == node.value_or(hello->node);
    if (!valid) throw Error("a leader of another group connected to this one");
    return *hello;
  }

  void check_version(const Hello& hello) const {
    if (hello.version == kVersion) return;
    throw Error(fmt::format("node {} runs Paceline {}, and node {} {}: all nodes need the same",
                            hello.node, hello.version, map_.node(), kVersion));
  }

  const NodeMap& map_;
  const LeaderOptions& options_;
  net::Listener listener_;
  net::Key key_;
  std::vector<Endpoint> endpoints_;  // by node, as are the next three
  NodeLinks::Connections links_;
  std::vector<std::optional<net::Connector>> connectors_;  // to the lower ones
  std::vector<bool> present_;                              // it has said hello
  std::string greeting_;
  bool failed_ = false;                                // this leader; the greeting is its failure
  std::deque<std::unique_ptr<Connection>> strangers_;  // the oldest first
};

}  // namespace

NodeLinks::Connections connect_leaders(shm::Exchange& exchange, const NodeMap& map,
                                       const LeaderOptions& options,
                                       const base::Deadline& deadline) {
  const int rank = map.leader_of(map.node());
  std::optional<net::Listener> listener;
  try {
    listener.emplace(base::listening_address(options.host, 0));
  } catch (const std::exception& error) {
    report_to_leaders(exchange, own_failure(options.ranks, rank, error));
    throw;
  }
  const Endpoint own{listener->address().port(), map.node() == 0 ? net::make_secret() : "-",
                     options.host};
  Meeting meeting(map, options, std::move(*listener));
  std::vector<Endpoint> endpoints;
  for (const std::string& blob : exchange.all_gather(own.encode(), deadline)) {
    endpoints.push_back(Endpoint::decode(blob));
  }
  meeting.begin(std::move(endpoints));
  try {
    while (!meeting.complete()) {
      if (deadline.expired()) meeting.fail(deadline);
      options.check_peers();
      meeting.advance(deadline);
    }
  } catch (const PeerError& error) {
    meeting.report(shm::failure_of(error));
    throw;
  } catch (const std::exception& error) {
    meeting.report(own_failure(options.ranks, rank, error));
    throw;
  }
  return meeting.take();
}

shm::Failure own_failure(const shm::GlobalRanks& ranks, int rank, const std::exception& error) {
  return {shm::FailureKind::peer_lost,
          {ranks.of(rank)},
          fmt::format("{} failed while the group was being formed: {}", ranks.describe({rank}),
                      error.what())};
}

void report_to_leaders(shm::Exchange& exchange, const shm::Failure& failure) noexcept {
  try {
    const std::string text = encode(Failed{failure});
    exchange.all_gather(std::string(kFailed) + text, base::Deadline::after(kReportLimit));
  } catch (const std::exception&) {
    // They have failed, too, or come later and read it then.
  }
}

}  // namespace paceline::internode
