#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace paceline::pipeline {

// By which stages notice that they read different batches.
struct TargetHash {
  std::int64_t form = 0;   // of the type and the sizes; 0: the target is not known
  std::int64_t bytes = 0;  // of the first 64 KiB

  bool is_known() const { return form != 0; }
  // Targets of other types or sizes are not compared: a stage may convert its own.
  bool contradicts(const TargetHash& other) const {
    return is_known() && form == other.form && bytes != other.bytes;
  }
};

// Not known if it is undefined or empty, or on an accelerator, where reading it would wait.
TargetHash hash_of(const at::Tensor& target);

}  // namespace paceline::pipeline
