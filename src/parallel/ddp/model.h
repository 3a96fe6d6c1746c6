#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <paceline/distributed.h>

namespace paceline::ddp {

struct NamedTensor {
  std::string name;  // in a module its path: "layer1.0.conv1.weight"
  at::Tensor tensor;
  bool sparse = false;  // a weight of an embedding whose gradients are sparse tensors
};

using Indices = std::vector<std::size_t>;  // of parameters

// "fc.weight, fc.bias"; of many, the first ones.
std::string names_of(const std::vector<NamedTensor>& tensors, const Indices& indices);

// Copies the tensors of `root`, a rank of the group, to all ranks by one broadcast for each type.
// Collective.
void broadcast_from(int root, const std::vector<at::Tensor>& tensors, const ProcessGroup& group);

// Throws the same Mismatch on every rank if the bits of the tensors differ: it names the first that
// differs, and the ranks that differ from the majority. Collective.
void check_same_values(const std::vector<NamedTensor>& tensors, const ProcessGroup& group,
                       std::uint64_t step);

}  // namespace paceline::ddp
