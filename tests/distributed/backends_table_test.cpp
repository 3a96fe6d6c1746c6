// The table of docs/backends.md.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using Probe = std::function<void(const ProcessGroup& group, int rank)>;

// The rows of the table: what two ranks try.
std::vector<std::pair<std::string, Probe>> probes() {
  const auto ones = [](int rows = 4) { return torch::ones({rows}); };
  const auto list = [](int size = 2) {
    return std::vector<at::Tensor>{torch::zeros({size}), torch::zeros({size})};
  };
  const auto reduce_with = [](at::ScalarType type, const ReduceOp& op) {
    return [type, op](const ProcessGroup& group, int) {
      all_reduce(torch::ones({4}, type), {.op = op, .group = group});
    };
  };
  return {
      {"`all_reduce`", reduce_with(at::kFloat, ReduceOp::SUM)},
      {"- of `Half` and `BFloat16`",
       [=](const ProcessGroup& group, int rank) {
         reduce_with(at::kHalf, ReduceOp::SUM)(group, rank);
         reduce_with(at::kBFloat16, ReduceOp::SUM)(group, rank);
       }},
      {"- with `AVG`", reduce_with(at::kFloat, ReduceOp::AVG)},
      {"- with `BAND`, `BOR`, `BXOR`", reduce_with(at::kInt, ReduceOp::BXOR)},
      {"- of sparse tensors",
       [](const ProcessGroup& group, int rank) {
         const auto indices = torch::tensor({{0, rank}}, at::kLong);
         all_reduce(torch::sparse_coo_tensor(indices, torch::ones({2}), {2}), {.group = group});
       }},
      {"`reduce`", [=](const ProcessGroup& group, int) { reduce(ones(), {.group = group}); }},
      {"`broadcast`", [=](const ProcessGroup& group, int) { broadcast(ones(), {.group = group}); }},
      {"`all_gather`",
       [=](const ProcessGroup& group, int) { all_gather(list(), ones(2), {.group = group}); }},
      {"- of tensors that differ in size",
       [=](const ProcessGroup& group, int rank) {
         all_gather({torch::zeros({1}), torch::zeros({2})}, ones(rank + 1), {.group = group});
       }},
      {"`all_gather_into_tensor`",
       [=](const ProcessGroup& group, int) {
         all_gather_into_tensor(torch::zeros({4}), ones(2), {.group = group});
       }},
      {"`gather`",
       [=](const ProcessGroup& group, int rank) {
         gather(ones(2), rank == 0 ? list() : std::vector<at::Tensor>(), {.group = group});
       }},
      {"`scatter`",
       [=](const ProcessGroup& group, int rank) {
         scatter(ones(2), rank == 0 ? list() : std::vector<at::Tensor>(), {.group = group});
       }},
      {"`reduce_scatter`",
       [=](const ProcessGroup& group, int) { reduce_scatter(ones(2), list(), {.group = group}); }},
      {"`reduce_scatter_tensor`",
       [=](const ProcessGroup& group, int) {
         reduce_scatter_tensor(torch::zeros({2}), ones(4), {.group = group});
       }},
      {"`all_to_all`",
       [=](const ProcessGroup& group, int) { all_to_all(list(), list(), {.group = group}); }},
      {"`all_to_all_single`",
       [=](const ProcessGroup& group, int) {
         all_to_all_single(torch::zeros({4}), ones(4), {.group = group});
       }},
      {"`barrier`", [](const ProcessGroup& group, int) { barrier({.group = group}); }},
      {"`monitored_barrier`",
       [](const ProcessGroup& group, int) { monitored_barrier({.group = group}); }},
      {"`send`, `recv`",
       [=](const ProcessGroup& group, int rank) {
         if (rank == 0) return send(ones(), 1, {.group = group});
         recv(torch::zeros({4}), {.src = 0, .group = group});
       }},
      {"`recv` from any rank",
       [=](const ProcessGroup& group, int rank) {
         if (rank == 1) recv(torch::zeros({4}), {.group = group});
         if (rank == 0) send(ones(), 1, {.group = group});
       }},
      {"`DistributedDataParallel`",
       [](const ProcessGroup& group, int) {
         DistributedDataParallel model(torch::nn::Linear(2, 2), DdpOptions{.process_group = group});
         model.forward(torch::ones({1, 2})).sum().backward();
       }},
  };
}

// What the page says of a backend, by row.
std::map<std::string, std::string> column_of(const std::string& backend) {
  std::ifstream page(BACKENDS_PAGE);
  std::map<std::string, std::string> column;
  std::size_t number = 0;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("|-")) continue;
    std::vector<std::string> cells;
    for (std::size_t at = 0; line.starts_with("| ") && at + 1 < line.size();) {
      const std::size_t end = line.find(" |", at + 1);
      cells.push_back(line.substr(at + 2, end - at - 2));
      at = end + 1;
    }
    const auto found = std::ranges::find(cells, backend);
    if (cells.empty()) {
      number = 0;
    } else if (found != cells.end() && cells.front() == "operation") {
      number = static_cast<std::size_t>(found - cells.begin());
    } else if (number > 0) {
      column[cells.front()] = cells.at(number);
    }
  }
  return column;
}

using BackendsTable = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, BackendsTable, test::worlds({2}), test::CaseName());

TEST_P(BackendsTable, SaysWhatEachBackendCan) {
  if (GetParam().size != 2) GTEST_SKIP() << "for two ranks";
  const std::map<std::string, std::string> names{
      {test::kAcrossNodes, "`paceline` on several nodes"},
      {test::kMpiAcrossNodes, "`paceline` on several nodes"}};
  const auto name = names.find(GetParam().backend);
  const auto column =
      column_of(name == names.end() ? "`" + GetParam().backend + "`" : name->second);
  test::expect_torch_ranks(GetParam(), [&](int rank, int) {
    EXPECT_EQ(column.size(), probes().size());
    for (const auto& [row, probe] : probes()) {
      // Some fail only at their time limit.
      const ProcessGroup group = new_group({}, {.timeout = std::chrono::seconds(2)});
      std::string answer = "yes";
      try {
        probe(group, rank);
      } catch (const std::exception&) {
        answer = "no";
      }
      // The other rank may see nothing of it.
      const at::Tensor refused = torch::full({1}, answer == "no" ? 1 : 0);
      all_reduce(refused);
      if (refused.item<int>() > 0) answer = "no";
      EXPECT_EQ(column.contains(row) ? column.at(row) : "not there", answer) << row;
    }
  });
}

}  // namespace
}  // namespace paceline
