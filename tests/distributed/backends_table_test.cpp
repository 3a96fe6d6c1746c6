// The table of docs/backends.md.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "support/backends_table.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using BackendsTable = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, BackendsTable, test::worlds({2}), test::CaseName());

TEST_P(BackendsTable, SaysWhatEachBackendCan) {
  if (GetParam().size != 2) GTEST_SKIP() << "for two ranks";
  const std::map<std::string, std::string> names{
      {test::kAcrossNodes, "`paceline` on several nodes"},
      {test::kMpiAcrossNodes, "`paceline` on several nodes"}};
  const auto name = names.find(GetParam().backend);
  const std::string column = name == names.end() ? "`" + GetParam().backend + "`" : name->second;
  test::expect_torch_ranks(GetParam(), [&](int rank, int) { test::expect_column(column, rank); });
}

}  // namespace
}  // namespace paceline
