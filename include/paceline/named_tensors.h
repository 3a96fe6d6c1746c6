#pragma once

/// @file
/// Models of plain tensors.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace paceline {

/// Tensors, each with the name that errors use for it: {{"w", w}, {"b", b}}.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace paceline
