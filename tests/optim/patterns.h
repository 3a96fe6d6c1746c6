#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace paceline::optim::test {

// Numbers that float32 has exactly; pattern of optimizers_expected.py.
inline at::Tensor pattern(std::int64_t numbers, int factor, int offset, int modulus,
                          double divisor) {
  return (torch::arange(numbers).mul(factor).add(offset).remainder(modulus) - modulus / 2)
             .to(at::kFloat) /
         divisor;
}

}  // namespace paceline::optim::test
