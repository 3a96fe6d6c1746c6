#include "base/address.h"

#include <gmock/gmock.h>

#include <paceline/error.h>

namespace paceline::base {
namespace {

using ::testing::HasSubstr;

TEST(Address, IsWrittenWithItsPort) {
  EXPECT_EQ(resolve("10.0.0.1", 29500).front().to_string(), "10.0.0.1:29500");
  EXPECT_EQ(resolve("::1", 29500).front().to_string(), "[::1]:29500");
  EXPECT_EQ(join_host_port("node0", 1), "node0:1");
  EXPECT_EQ(join_host_port("fe80::1%eth0", 1), "[fe80::1%eth0]:1");
}

TEST(Address, AServerListensAtTheAddressOfAnInterfaceAndElseAtAll) {
  EXPECT_EQ(listening_address("127.0.0.1", 5).to_string(), "127.0.0.1:5");
  // Reserved for documentation (RFC 5737, RFC 3849).
  EXPECT_EQ(listening_address("192.0.2.1", 5).to_string(), "0.0.0.0:5");
  EXPECT_EQ(listening_address("2001:db8::1", 5).to_string(), "[::]:5");
}

TEST(Address, NamesTheHostThatCannotBeResolved) {
  try {
    resolve("no-such-host.invalid", 1);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot resolve no-such-host.invalid: "));
  }
}

}  // namespace
}  // namespace paceline::base
