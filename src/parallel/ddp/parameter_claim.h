#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// The claim of one reducer on its parameters: two would reduce the same gradients twice. Throws
// UsageError if there is another on any of them. Thread-safe.
class ParameterClaim {
 public:
  explicit ParameterClaim(const std::vector<NamedTensor>& parameters);
  ParameterClaim(const ParameterClaim&) = delete;
  ParameterClaim& operator=(const ParameterClaim&) = delete;
  ~ParameterClaim();

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace paceline::ddp
