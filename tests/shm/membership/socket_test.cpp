#include <gtest/gtest.h>
#include <unistd.h>

#include <array>

#include "base/pipe.h"
#include "shm/membership/socket.h"
#include "support/bootstrap_socket_pair.h"

namespace paceline::shm {
namespace {

using test::BootstrapSocketPair;
using test::make_bootstrap_sockets;

const base::Deadline kSoon = base::Deadline::after(std::chrono::seconds(10));

TEST(Packets, CarryBytesDescriptorsAndCredentials) {
  const BootstrapSocketPair link = make_bootstrap_sockets();
  want_credentials(link.second.get());
  const base::Pipe pipe = base::make_pipe();
  const std::array<int, 1> fds{pipe.write_end.get()};
  EXPECT_TRUE(send_packet(link.first.get(), "hello", fds, kSoon));
  const Packet packet = receive_packet(link.second.get(), 100);
  EXPECT_FALSE(packet.closed);
  EXPECT_EQ(packet.bytes, "hello");
  EXPECT_EQ(packet.pid, ::getpid());
  ASSERT_EQ(packet.fds.size(), 1u);
  char byte = 'x';
  ASSERT_EQ(::write(packet.fds[0].get(), &byte, 1), 1);
  ASSERT_EQ(::read(pipe.read_end.get(), &byte, 1), 1);
}

// The kernel reports the loss of what nobody read before it hands out what came.
TEST(Packets, ArriveFromAnEndThatClosedWithoutReading) {
  BootstrapSocketPair link = make_bootstrap_sockets();
  EXPECT_TRUE(send_packet(link.first.get(), "a hello", {}, kSoon));
  EXPECT_TRUE(send_packet(link.second.get(), "a verdict", {}, kSoon));
  link.second.reset();
  EXPECT_EQ(receive_packet(link.first.get(), 100).bytes, "a verdict");
  EXPECT_TRUE(receive_packet(link.first.get(), 100).closed);
  EXPECT_FALSE(send_packet(link.first.get(), "a hello", {}, kSoon));
}

}  // namespace
}  // namespace paceline::shm
