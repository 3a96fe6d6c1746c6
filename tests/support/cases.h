#pragma once

#include <gtest/gtest.h>

#include <string>

namespace paceline::test {

// What a test over several ranks runs on, as its parameter: each is a case with a name.
struct WorldCase {
  std::string backend;
  int size;
};
using WorldTest = ::testing::TestWithParam<WorldCase>;
using BackendTest = ::testing::TestWithParam<std::string>;
using SizeTest = ::testing::TestWithParam<int>;

// "2Ranks", "gloo", "gloo2Ranks".
struct CaseName {
  static std::string of(int size) { return std::to_string(size) + "Ranks"; }
  static std::string of(const std::string& backend) { return backend; }
  static std::string of(const WorldCase& world) { return of(world.backend) + of(world.size); }
  template <typename Param>
  std::string operator()(const ::testing::TestParamInfo<Param>& info) const {
    return of(info.param);
  }
};

}  // namespace paceline::test
