// What Config says in a build without yaml-cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <paceline/error.h>

#include "train/yaml_file.h"

namespace paceline::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(WithoutYaml, NamesThePackageThatIsMissing) {
  const auto names_package =
      ThrowsMessage<UsageError>(HasSubstr("apt-get install libyaml-cpp-dev"));
  EXPECT_THAT([] { parse_yaml("a: 1", "file"); }, names_package);
  EXPECT_THAT([] { parse_yaml_list("[a]", "--list"); }, names_package);
  EXPECT_THAT([] { write_yaml({}); }, names_package);
}

}  // namespace
}  // namespace paceline::train
