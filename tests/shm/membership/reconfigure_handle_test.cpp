#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <paceline/error.h>

#include "shm/membership/reconfigure_handle.h"

namespace paceline::shm {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(ReconfigureHandle, DecodesToWhatWasEncoded) {
  const ReconfigureHandle handle{7, Endpoint::own(true)};
  const auto decoded = ReconfigureHandle::decode(handle.encode());
  EXPECT_EQ(decoded.rank, 7);
  EXPECT_EQ(decoded.endpoint.pid, handle.endpoint.pid);
  EXPECT_EQ(decoded.endpoint.pids, handle.endpoint.pids);
  EXPECT_EQ(decoded.endpoint.machine, handle.endpoint.machine);
  EXPECT_EQ(decoded.endpoint.socket, handle.endpoint.socket);
}

std::string refusal(const std::string& text) {
  try {
    ReconfigureHandle::decode(text);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "decoded";
}

TEST(ReconfigureHandle, RefusesOtherText) {
  for (const char* const text :
       {"", "paceline", "gloo,0,1,a,b,c", "paceline,0,1,a,b", "paceline,0,1,a,b,",
        "paceline,0,1,a,b,c,", "paceline,-1,1,a,b,c", "paceline,0,0,a,b,c", "paceline,x,1,a,b,c",
        "paceline,0,1 ,a,b,c", "paceline,0,99999999999,a,b,c"}) {
    EXPECT_THAT(refusal(text), AllOf(StartsWith("'" + std::string(text) + "' is not a handle"),
                                     HasSubstr("get_reconfigure_handle")));
  }
  EXPECT_THAT(refusal("paceline,0,1,a,b," + std::string(2000, 'c')), HasSubstr("ccc'... is not"));
  EXPECT_THAT(refusal(std::string("\0\33[31m\xff", 7)), StartsWith("'??[31m?' is not"));
}

}  // namespace
}  // namespace paceline::shm
