#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace paceline::test {

inline constexpr int kBatch = 6;
inline constexpr double kTinyBucket = 0.001;  // MiB: gives a Net several buckets

// Has several parameters of different sizes, so a small bucket cap gives several buckets.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(9, 40))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(40, 33))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(33, 2))};
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
};
TORCH_MODULE(Net);

inline Net make_net(at::ScalarType type, std::uint64_t seed = 3) {
  torch::manual_seed(seed);
  Net net;
  net->to(type);
  return net;
}

// The batch of one rank in one step.
inline torch::Tensor batch_of(int rank, int step, at::ScalarType type) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({kBatch, 9}, torch::kDouble).to(type);
}

inline torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& x) {
  return (output - torch::stack({x.sum(1), x.prod(1)}, 1)).pow(2).mean();
}

inline std::string bytes_of(const std::vector<torch::Tensor>& tensors) {
  std::string bytes;
  for (const auto& tensor : tensors) {
    const auto dense = tensor.detach().contiguous();
    bytes.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
  }
  return bytes;
}

inline void expect_close(const std::vector<torch::Tensor>& got,
                         const std::vector<torch::Tensor>& expected, double relative) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto scale = expected[i].abs().max().item<double>();
    EXPECT_LE((got[i] - expected[i]).abs().max().item<double>(), relative * scale)
        << "tensor " << i;
  }
}

inline void expect_same_gradients(const std::vector<torch::Tensor>& got,
                                  const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::allclose(got[i].grad(), expected[i].grad(), 1e-12, 1e-14)) << "tensor " << i;
  }
}

// The parameters of a net before its first step, with the gradients of all ranks' batches.
inline std::vector<torch::Tensor> whole_batch_gradients(int step, int size) {
  auto net = make_net(at::kDouble);
  for (int rank = 0; rank < size; ++rank) {
    const auto x = batch_of(rank, step, at::kDouble);
    (loss_of(net(x), x) / size).backward();
  }
  return net->parameters();
}

}  // namespace paceline::test
