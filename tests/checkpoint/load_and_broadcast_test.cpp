#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/collectives.h>
#include <paceline/error.h>

#include "checkpoint/expected_tensors.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::expect_same;
using test::expect_torch_ranks;
using test::kPythonsTypes;
using test::numbers;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using LoadAndBroadcastBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, LoadAndBroadcastBackends, ::testing::ValuesIn(test::backends()),
                         test::CaseName());

// Only the last rank has the file.
TEST_P(LoadAndBroadcastBackends, GivesAllRanksWhatOneReads) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory.path() / "all.safetensors";
  StateDict state;
  for (const auto& [name, type] : kPythonsTypes) state.insert(name, numbers(type));
  state.insert("scalar", torch::tensor(2.5));
  state.insert("empty", torch::empty({0, 4}));
  state.insert("transposed", numbers(at::kDouble).t());
  save(state, path);
  expect_torch_ranks(3, GetParam(), [&](int rank, int size) {
    const auto own = rank == size - 1 ? path : directory.path() / "none";
    const StateDict loaded = load(own, {.broadcast = true, .src = size - 1});
    EXPECT_EQ(loaded.keys(), load(path).keys());
    for (const auto& one : state) expect_same(loaded[one.key()], one.value(), one.key());
    loaded["scalar"].zero_();  // each rank's memory is its own
    barrier();
    EXPECT_EQ(load(path)["scalar"].item<float>(), 2.5);
  });
}

// Python's file has lazy conjugates, views and more.
TEST(LoadAndBroadcast, GivesTensorsOfAnyKind) {
  const fs::path path = fs::path(FILES_DIRECTORY) / "tensors.pt";
  expect_torch_ranks(2, "paceline", [&](int, int) {
    const StateDict loaded = load(path, {.broadcast = true});
    for (const auto& one : load(path)) {
      expect_same(loaded[one.key()], one.value().resolve_conj().resolve_neg(), one.key());
    }
  });
}

TEST(LoadAndBroadcast, LoadsAModuleOfAGroup) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory.path() / "net.pt";
  expect_torch_ranks(3, "paceline", [&](int rank, int) {
    torch::manual_seed(rank);
    torch::nn::Linear net(3, 2);
    if (rank == 2) save(*net, path);
    barrier();
    const at::Tensor before = net->weight.clone();
    const ProcessGroup group = new_group({0, 2});
    if (rank != 1) {
      const auto own = rank == 2 ? path : directory.path() / "none";
      load(*net, own, {.broadcast = true, .src = 2, .group = group});
      EXPECT_TRUE(net->weight.equal(load(path)["weight"]));
    }
    EXPECT_EQ(net->weight.equal(before), rank != 0);
    EXPECT_TRUE(net->weight.requires_grad());
  });
}

TEST(LoadAndBroadcast, ThrowsOnAllRanksIfOneFails) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory.path() / "net.pt";
  expect_torch_ranks(3, "paceline", [&](int rank, int) {
    torch::nn::Linear net(3, rank == 1 ? 5 : 2);
    if (rank == 0) save(*net, path);
    barrier();
    EXPECT_THAT([&] { load(*net, path, {.broadcast = true}); },
                ThrowsMessage<Error>(AllOf(HasSubstr("load: rank 1: "), HasSubstr("net.pt"),
                                           HasSubstr("weight (2x3 in place of 5x3)"))));
    EXPECT_THAT([&] { load(*net, directory.path() / "none", {.broadcast = true, .src = 1}); },
                ThrowsMessage<Error>(AllOf(HasSubstr("load: rank 1: "), HasSubstr("none"))));
    if (rank == 0) std::ofstream(path) << "no tensors";
    barrier();
    EXPECT_THAT([&] { load(*net, path, {.broadcast = true}); },
                ThrowsMessage<Error>(AllOf(HasSubstr("load: rank 0: "), HasSubstr("net.pt"))));
    EXPECT_THAT([&] { load(*net, path, {.broadcast = true, .src = 3}); },
                ThrowsMessage<UsageError>(HasSubstr("3")));
    all_reduce(torch::ones({1}));
  });
}

}  // namespace
}  // namespace paceline
