#include <paceline/print.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>

#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Print, IsOfRankZeroUnlessForced) {
  const test::TemporaryDirectory directory;
  expect_torch_ranks(3, "paceline", [&](int rank, int) {
    const auto path = directory.path() / std::to_string(rank);
    std::FILE* const file = std::fopen(path.c_str(), "w");
    print("once", {.output = file});
    print("each", {.force = true, .output = file});
    std::fclose(file);
    EXPECT_EQ(content(path), rank == 0 ? "once\neach\n" : "each\n");
  });
}

TEST(SilenceOtherRanks, LeavesWhatIsForced) {
  const test::TemporaryDirectory directory;
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    const auto path = directory.path() / std::to_string(rank);
    ASSERT_NE(std::freopen(path.c_str(), "w", stdout), nullptr);
    std::cout << "before ";
    std::printf("it\n");
    silence_other_ranks();
    silence_other_ranks();
    std::cout << "by cout\n" << std::flush;
    std::printf("by printf\n");
    print("by print");
    print("forced", {.force = true});
    std::fflush(stdout);
    EXPECT_EQ(content(path), rank == 0 ? "before it\nby cout\nby printf\nby print\nforced\n"
                                       : "before it\nforced\n");
  });
}

TEST(ManualSeed, IsOfAllRanksOrOfEach) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    for (const bool per_rank : {false, true}) {
      const std::uint64_t expected = per_rank ? 7 + static_cast<std::uint64_t>(rank) : 7;
      EXPECT_EQ(manual_seed(7, {.per_rank = per_rank}), expected);
      const at::Tensor drawn = torch::rand({3});
      torch::manual_seed(expected);
      EXPECT_TRUE(drawn.equal(torch::rand({3})));
    }
  });
}

}  // namespace
}  // namespace paceline
