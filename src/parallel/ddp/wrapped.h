#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// The claim of one reducer on its parameters: two would reduce the same gradients twice. Throws
// UsageError if there is another on any of them. Thread-safe.
class Wrapped {
 public:
  explicit Wrapped(const std::vector<NamedTensor>& parameters);
  Wrapped(const Wrapped&) = delete;
  Wrapped& operator=(const Wrapped&) = delete;
  ~Wrapped();

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace paceline::ddp
