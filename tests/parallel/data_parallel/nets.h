#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include <paceline/data_parallel.h>

namespace paceline::test {

struct TwoLayersImpl : torch::nn::Cloneable<TwoLayersImpl> {
  TwoLayersImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, 5));
    last = register_module("last", torch::nn::Linear(5, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }

  torch::nn::Linear first{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(TwoLayers);

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(at::Device device)
      : factor(register_parameter("factor", torch::ones(1, device))),
        offset(register_buffer("offset", torch::zeros(1, device))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x * factor + offset; }

  torch::Tensor factor;
  torch::Tensor offset;
};

// The second replica is on a device that computes shapes only, so nothing can be gathered from it.
inline DataParallel<ScaleImpl> make_with_meta() {
  int made = 0;
  const auto factory = [&] {
    return std::make_shared<ScaleImpl>(made++ < 2 ? at::kCPU : at::kMeta);
  };
  return {factory, {.device_ids = {at::kCPU, at::kMeta}}};
}

// In float64, always the same.
template <typename Holder>
Holder make() {
  torch::manual_seed(5);
  Holder net;
  net->to(at::kDouble);
  return net;
}

inline torch::Tensor random_batch(std::int64_t samples, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return torch::randn({samples, 4}, at::kDouble);
}

inline void expect_near(const torch::Tensor& got, const torch::Tensor& expected) {
  ASSERT_EQ(got.defined(), expected.defined());
  if (!got.defined()) return;
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(torch::allclose(got, expected, 1e-12, 1e-14)) << got << expected;
}

inline void expect_near_gradients(const std::vector<torch::Tensor>& got,
                                  const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) expect_near(got[i].grad(), expected[i].grad());
}

}  // namespace paceline::test
