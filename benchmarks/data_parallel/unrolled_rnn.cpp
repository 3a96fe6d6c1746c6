#include "unrolled_rnn.h"

#include <ATen/Functions.h>

namespace paceline::bench {
namespace {

constexpr std::int64_t kHidden = 64;

}  // namespace

UnrolledRnn::UnrolledRnn()
    : input_(register_module("input", torch::nn::Linear(kFeatures, kHidden))),
      hidden_(register_module("hidden", torch::nn::Linear(kHidden, kHidden))),
      output_(register_module("output", torch::nn::Linear(kHidden, kClasses))) {}

torch::Tensor UnrolledRnn::forward(torch::Tensor x) {
  auto state = at::zeros({x.size(0), kHidden});
  for (std::int64_t step = 0; step < x.size(1); ++step) {
    state = at::tanh(input_(x.select(1, step)) + hidden_(state));
  }
  return output_(state);
}

}  // namespace paceline::bench
