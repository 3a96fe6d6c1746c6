#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/device_mesh.h>

#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using ::testing::HasSubstr;

TEST(DeviceMesh, HasAGroupForEachRow) {
  expect_torch_ranks(6, "paceline", [](int rank, int) {
    const auto mesh = init_device_mesh({3, 2}, {"dp", "pp"});
    EXPECT_EQ(mesh.size("dp"), 3);
    EXPECT_EQ(mesh.size("pp"), 2);
    EXPECT_EQ(mesh.get_local_rank("dp"), rank / 2);
    EXPECT_EQ(mesh.get_local_rank("pp"), rank % 2);
    const auto sum = [&](const char* name) {
      const auto number = torch::full({1}, rank, at::kLong);
      all_reduce(number, {.group = mesh.get_group(name)});
      return number.item<std::int64_t>();
    };
    EXPECT_EQ(sum("dp"), rank % 2 == 0 ? 0 + 2 + 4 : 1 + 3 + 5);
    EXPECT_EQ(sum("pp"), 4 * (rank / 2) + 1);
  });
}

TEST(DeviceMesh, RejectsShapesAndNamesThatDoNotFit) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto refuses = [](std::vector<int> shape, std::vector<std::string> names,
                            const char* text) {
      EXPECT_THAT([&] { static_cast<void>(init_device_mesh(shape, names)); },
                  ThrowsMessage<UsageError>(HasSubstr(text)));
    };
    refuses({2, 2}, {"a", "b"}, "their product 2");
    refuses({-2, -1}, {"a", "b"}, "positive");
    refuses({2}, {"a", "b"}, "a name of its own");
    refuses({2, 1}, {"a", "a"}, "a name of its own");
    const auto mesh = init_device_mesh({2}, {"dp"});
    EXPECT_THAT([&] { mesh.get_group("tp"); },
                ThrowsMessage<UsageError>(HasSubstr("no dimension tp; it has dp")));
  });
}

}  // namespace
}  // namespace paceline
