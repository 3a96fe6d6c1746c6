#pragma once

#include <gtest/gtest.h>

#include <string>

namespace paceline::test {

// A test that runs once for each number of ranks. For tests without torch: CTest starts a process
// for each case, which is cheap without it.
class OnRanks : public ::testing::TestWithParam<int> {
 public:
  static std::string name(const ::testing::TestParamInfo<int>& info) {
    return "Ranks_" + std::to_string(info.param);
  }
};

}  // namespace paceline::test
