#include "net/connection.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "net/connector.h"
#include "net/listener.h"

namespace paceline::net {
namespace {

using base::Address;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Key kSharedKey = make_key("a secret of a job");

Address loopback(int port = 0) {
  return base::resolve("127.0.0.1", port).front();
}

template <typename... Ends>
void wait_for(const Ends&... ends) {
  std::vector<pollfd> fds;
  (ends.add_to(fds), ...);
  ::poll(fds.data(), fds.size(), 20);
}

base::UniqueFd connect_to(const Address& address) {
  Connector connector(address.host(), address.port());
  for (;;) {
    if (auto socket = connector.advance()) return std::move(*socket);
    wait_for(connector);
  }
}

struct Pair {
  Listener listener{loopback()};
  Connection connecting{connect_to(listener.address()), kSharedKey, SecureChannel::Side::connecting,
                        "launcher"};
  Connection accepting{std::move(*listener.accept()), kSharedKey, SecureChannel::Side::accepting,
                       "launcher"};

  // Until `receiver` has `count` messages.
  std::vector<std::string> receive(Connection& receiver, std::size_t count) {
    std::vector<std::string> messages;
    while (messages.size() < count && !receiver.loss()) {
      wait_for(connecting, accepting);
      Connection& other = &receiver == &connecting ? accepting : connecting;
      other.receive();
      for (std::string& message : receiver.receive()) messages.push_back(std::move(message));
    }
    return messages;
  }
};

TEST(Connection, CarriesMessagesLargerThanTheSocketsBuffers) {
  Pair pair;
  const std::string large(SecureChannel::kMaxMessage, 'x');
  pair.connecting.send("small");
  pair.connecting.send(large);
  EXPECT_THAT(pair.receive(pair.accepting, 2), ElementsAre("small", large));
  EXPECT_FALSE(pair.connecting.pending());
  pair.accepting.send("answer");
  EXPECT_THAT(pair.receive(pair.connecting, 1), ElementsAre("answer"));
}

TEST(Connection, GivesWhatCameBeforeItWasLost) {
  std::optional<Pair> pair(std::in_place);
  pair->connecting.send("last words");
  EXPECT_THAT(pair->receive(pair->accepting, 1), ElementsAre("last words"));
  pair->connecting.send("indeed");
  Connection gone = std::move(pair->connecting);
  { const Connection closed = std::move(gone); }
  std::vector<std::string> messages;
  while (!pair->accepting.loss()) {
    wait_for(pair->accepting);
    for (const std::string& message : pair->accepting.receive()) messages.push_back(message);
  }
  EXPECT_THAT(messages, ElementsAre("indeed"));
  EXPECT_THAT(pair->accepting.loss()->why, HasSubstr("it closed the connection"));
  pair->accepting.send("into the void");
  EXPECT_FALSE(pair->accepting.pending());
}

TEST(Connection, IsLostWithItsProcessEvenIfAForkedChildLivesOn) {
  std::optional<Pair> pair(std::in_place);
  int go_on[2];
  int closed[2];
  ASSERT_EQ(::pipe2(go_on, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(closed, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    const bool told = ::write(closed[1], &byte, 1) == 1 && ::read(go_on[0], &byte, 1) == 1;
    ::_exit(told ? 0 : 1);
  }
  char byte = 0;
  EXPECT_EQ(::read(closed[0], &byte, 1), 1);
  { const Connection gone = std::move(pair->connecting); }
  for (int i = 0; i < 100 && !pair->accepting.loss(); ++i) {
    wait_for(pair->accepting);
    pair->accepting.receive();
  }
  EXPECT_TRUE(pair->accepting.loss());
  EXPECT_EQ(::write(go_on[1], &byte, 1), 1);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int fd : {go_on[0], go_on[1], closed[0], closed[1]}) ::close(fd);
}

TEST(Connector, WaitsForAListener) {
  const PortReservation port(loopback());
  Connector connector("127.0.0.1", port.port());
  while (connector.last_failure().empty()) {
    EXPECT_FALSE(connector.advance());
    wait_for(connector);
  }
  EXPECT_THAT(connector.last_failure(), HasSubstr("ECONNREFUSED"));
  Listener listener(loopback(port.port()));
  std::optional<base::UniqueFd> socket;
  while (!socket) {
    pollfd none{-1, 0, 0};
    ::poll(&none, 1, static_cast<int>(connector.deadline().remaining().count()) / 10 + 1);
    socket = connector.advance();
  }
  EXPECT_TRUE(listener.accept());
  EXPECT_FALSE(connector.deadline().expired());
  EXPECT_GT(connector.deadline().remaining(), std::chrono::hours(1));
}

constexpr int kSkipped = 77;

// In a network of its own, whose sockets get the port that nobody listens at.
int run_alone_with_port(int port) {
  if (::unshare(CLONE_NEWNET) != 0) return kSkipped;
  const base::UniqueFd any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq loopback_up{};
  std::strcpy(loopback_up.ifr_name, "lo");
  loopback_up.ifr_flags = IFF_UP;
  if (::ioctl(any.get(), SIOCSIFFLAGS, &loopback_up) != 0) return kSkipped;
  std::ofstream("/proc/sys/net/ipv4/ip_local_port_range") << port << ' ' << port + 1;
  Connector connector("127.0.0.1", port);
  while (connector.last_failure().empty()) {
    if (connector.advance()) return 1;
    wait_for(connector);
  }
  return connector.last_failure().find("ECONNREFUSED") != std::string::npos ? 0 : 2;
}

TEST(Connector, DoesNotConnectToItself) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(run_alone_with_port(40000));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (status == W_EXITCODE(kSkipped, 0)) GTEST_SKIP() << "a network of its own needs root";
  EXPECT_EQ(status, 0);
}

TEST(Connector, NamesAHostThatCannotBeResolved) {
  Connector connector("no-such-host.invalid", 1);
  EXPECT_FALSE(connector.advance());
  EXPECT_THAT(connector.last_failure(), HasSubstr("cannot resolve no-such-host.invalid"));
}

// The kernel gives the port to nobody who asks for any port, and a server may still take it.
TEST(PortReservation, KeepsThePortForAServer) {
  const PortReservation port(loopback());
  EXPECT_THROW(
      [&] {
        const base::UniqueFd other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const Address address = loopback(port.port());
        if (::bind(other.get(), address.data(), address.size()) != 0) throw Error("taken");
      }(),
      Error);
  EXPECT_EQ(Listener(loopback(port.port())).address().port(), port.port());
  EXPECT_EQ(Listener(loopback(port.port())).address().port(), port.port());
}

TEST(Listener, NamesAnAddressThatIsTaken) {
  const Listener first(loopback());
  try {
    const Listener second(first.address());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(first.address().to_string()));
    EXPECT_THAT(error.what(), HasSubstr("EADDRINUSE"));
  }
}

}  // namespace
}  // namespace paceline::net
