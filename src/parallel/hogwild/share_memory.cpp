#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/hogwild.h>

#include "distributed/backend.h"
#include "distributed/process_state.h"
#include "parallel/ddp/wrapped_model.h"
#include "parallel/parameter_server/flat_tensors.h"

namespace paceline {
namespace {

int count_nodes(const ProcessGroup& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < get_world_size(group); ++rank) {
    ranks.push_back(distributed::global_rank_of(group, rank));
  }
  const auto nodes = topology();
  return static_cast<int>(std::ranges::count_if(nodes, [&](const Node& node) {
    return std::ranges::find_first_of(node.ranks, ranks) != node.ranks.end();
  }));
}

distributed::ExtendedBackend& sharing_backend(const ProcessGroup& group) {
  const std::string name = get_backend(group);
  const int nodes = count_nodes(group);
  if (name != "paceline" || nodes > 1) {
    throw UsageError(
        fmt::format("share_memory in a group over the backend {} on {} nodes: ranks share memory "
                    "over the backend paceline on one node",
                    name, nodes));
  }
  return dynamic_cast<distributed::ExtendedBackend&>(*group.c10d()->getDefaultBackend());
}

void check_same_tensors(const ddp::WrappedModel& model, const ProcessGroup& group) {
  const auto texts =
      all_gather_bytes(fmt::format("{}", fmt::join(ddp::describe(model), "\n")), {.group = group});
  const auto first = ddp::split_lines(texts[0]);
  for (std::size_t i = 1; i < texts.size(); ++i) {
    if (texts[i] == texts[0]) continue;
    const int rank = distributed::global_rank_of(group, static_cast<int>(i));
    throw Mismatch(ddp::first_difference(first, ddp::split_lines(texts[i]),
                                         {distributed::global_rank_of(group, 0), rank}),
                   {rank}, "share_memory", 0);
  }
}

// Each tensor gets memory of its own.
void check_no_overlap(const std::vector<ddp::NamedTensor>& named) {
  for (std::size_t i = 0; i < named.size(); ++i) {
    for (std::size_t j = i + 1; j < named.size(); ++j) {
      const auto status = at::get_overlap_status(named[i].tensor, named[j].tensor);
      if (status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial) continue;
      throw UsageError(fmt::format(
          "share_memory: {} and {} overlap in memory, and would be separate afterwards: share the "
          "tensor that they are views of, and take the views then",
          named[i].name, named[j].name));
    }
  }
}

void share_tensors(const ddp::WrappedModel& model, const ProcessGroup& group) {
  auto& backend = sharing_backend(group);
  check_same_tensors(model, group);
  auto named = model.parameters();
  for (auto& buffer : model.buffers()) named.push_back(std::move(buffer));
  named = parameter_server::distinct_tensors(named, "share_memory");
  check_no_overlap(named);
  parameter_server::Tensors tensors;
  for (const auto& one : named) tensors.push_back(one.tensor);
  parameter_server::FlatTensors shared(
      tensors, [&](std::size_t bytes) { return backend.allocate_shared(bytes); });
  if (get_rank(group) == 0) shared.write(tensors);
  barrier({.group = group});
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].set_data(shared.at(i));
}

}  // namespace

void share_memory(torch::nn::Module& module, const ProcessGroup& group) {
  share_tensors(ddp::WrappedModel(module), group);
}

void share_memory(const NamedTensors& tensors, const ProcessGroup& group) {
  share_tensors(ddp::WrappedModel(tensors, NamedTensors()), group);
}

}  // namespace paceline
