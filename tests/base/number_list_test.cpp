#include "base/number_list.h"

#include <gmock/gmock.h>

#include <vector>

namespace paceline::base {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(NumberList, IsWrittenAsTheKernelDoes) {
  EXPECT_EQ(list_text(std::vector<int>{}), "");
  EXPECT_EQ(list_text(std::vector<int>{7}), "7");
  EXPECT_EQ(list_text(std::vector<int>{0, 1, 2, 4, 8, 9}), "0-2,4,8-9");
}

TEST(NumberList, IsReadBack) {
  EXPECT_THAT(parse_list("0-2,4,8-9", 10), ElementsAre(0, 1, 2, 4, 8, 9));
  EXPECT_THAT(parse_list("5", 6), ElementsAre(5));
}

TEST(NumberList, IsEmptyIfItIsMalformedOrTooLong) {
  for (const char* bad : {"", "-", "1-", "x", "1,,2", "-1", "0-99999999999", "0x1", "1 2", "3-1",
                          "0-3,2", "0-9,0-9", "10", "9-10", "1;2"}) {
    EXPECT_THAT(parse_list(bad, 10), IsEmpty()) << bad;
  }
}

}  // namespace
}  // namespace paceline::base
