#pragma once

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

namespace paceline::test {

// The table of docs/backends.md, by which two ranks try what a backend can.
using Probe = std::function<void(const ProcessGroup& group, int rank)>;

// The rows of the table: what two ranks try.
inline std::vector<std::pair<std::string, Probe>> probes(at::Device device = at::kCPU) {
  const auto ones = [=](int rows = 4) { return torch::ones({rows}, device); };
  const auto zeros = [=](int rows) { return torch::zeros({rows}, device); };
  const auto list = [=](int size = 2) { return std::vector<at::Tensor>{zeros(size), zeros(size)}; };
  const auto reduce_with = [=](at::ScalarType type, const ReduceOp& op) {
    return [=](const ProcessGroup& group, int) {
      all_reduce(torch::ones({4}, at::device(device).dtype(type)), {.op = op, .group = group});
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
       [=](const ProcessGroup& group, int rank) {
         const auto indices = torch::tensor({{0, rank}}, at::kLong).to(device);
         all_reduce(torch::sparse_coo_tensor(indices, ones(2), {2}), {.group = group});
       }},
      {"`reduce`", [=](const ProcessGroup& group, int) { reduce(ones(), {.group = group}); }},
      {"`broadcast`", [=](const ProcessGroup& group, int) { broadcast(ones(), {.group = group}); }},
      {"`all_gather`",
       [=](const ProcessGroup& group, int) { all_gather(list(), ones(2), {.group = group}); }},
      {"- of tensors that differ in size",
       [=](const ProcessGroup& group, int rank) {
         all_gather({zeros(1), zeros(2)}, ones(rank + 1), {.group = group});
       }},
      {"`all_gather_into_tensor`",
       [=](const ProcessGroup& group, int) {
         all_gather_into_tensor(zeros(4), ones(2), {.group = group});
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
         reduce_scatter_tensor(zeros(2), ones(4), {.group = group});
       }},
      {"`all_to_all`",
       [=](const ProcessGroup& group, int) { all_to_all(list(), list(), {.group = group}); }},
      {"`all_to_all_single`", [=](const ProcessGroup& group,
                                  int) { all_to_all_single(zeros(4), ones(4), {.group = group}); }},
      {"`barrier`", [](const ProcessGroup& group, int) { barrier({.group = group}); }},
      {"`monitored_barrier`",
       [](const ProcessGroup& group, int) { monitored_barrier({.group = group}); }},
      {"`send`, `recv`",
       [=](const ProcessGroup& group, int rank) {
         if (rank == 0) return send(ones(), 1, {.group = group});
         recv(zeros(4), {.src = 0, .group = group});
       }},
      {"`recv` from any rank",
       [=](const ProcessGroup& group, int rank) {
         if (rank == 1) recv(zeros(4), {.group = group});
         if (rank == 0) send(ones(), 1, {.group = group});
       }},
      {"`DistributedDataParallel`",
       [=](const ProcessGroup& group, int) {
         torch::nn::Linear net(2, 2);
         net->to(device);
         DistributedDataParallel model(net, DdpOptions{.process_group = group});
         model.forward(torch::ones({1, 2}, device)).sum().backward();
       }},
  };
}

// What the page says of a backend, by row.
inline std::map<std::string, std::string> column_of(const std::string& backend) {
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

// On each of two ranks: compares a column with what groups like the world can.
inline void expect_column(const std::string& backend, int rank, at::Device device = at::kCPU) {
  const auto column = column_of(backend);
  EXPECT_EQ(column.size(), probes().size());
  for (const auto& [row, probe] : probes(device)) {
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
}

}  // namespace paceline::test
