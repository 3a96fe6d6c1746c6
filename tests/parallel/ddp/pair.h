#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

// Models of a few parameters, for tests of particular graphs.
namespace paceline::test {

// Two parameters. The test supplies the forward.
struct PairImpl : torch::nn::Module {
  using Body = std::function<torch::Tensor(PairImpl&, const torch::Tensor&)>;
  PairImpl(const torch::Tensor& first, const torch::Tensor& second, Body run)
      : w(register_parameter("w", first)), v(register_parameter("v", second)), body(run) {}
  torch::Tensor forward(const torch::Tensor& x) { return body(*this, x); }
  torch::Tensor w, v;
  Body body;
};
TORCH_MODULE(Pair);

inline Pair make_pair(at::IntArrayRef w, at::IntArrayRef v, const PairImpl::Body& body,
                      at::ScalarType type = at::kDouble) {
  torch::manual_seed(1);
  return Pair(torch::randn(w, type), torch::randn(v, type), body);
}

inline torch::Tensor input_of(int rank, int step, at::IntArrayRef sizes,
                              at::ScalarType type = at::kDouble) {
  torch::manual_seed(static_cast<std::uint64_t>(10 + 100 * step + rank));
  return torch::randn(sizes, type);
}

// A loss, also of complex outputs.
inline torch::Tensor squared_norm(const torch::Tensor& output) {
  return (output.is_complex() ? at::view_as_real(output.resolve_conj()) : output).pow(2).sum();
}

// The average over ranks of the gradients of w and v, computed without DDP.
inline std::vector<torch::Tensor> averaged_gradients(Pair& pair, const torch::Tensor& x, int size) {
  std::vector<torch::Tensor> averages;
  const auto gradients = torch::autograd::grad({squared_norm(pair->forward(x))}, {pair->w, pair->v},
                                               {}, {}, false, true);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const torch::Tensor& like = i == 0 ? pair->w : pair->v;
    const torch::Tensor sum = gradients[i].defined()
                                  ? gradients[i].resolve_conj().contiguous().clone()
                                  : torch::zeros_like(like);
    all_reduce(sum);
    averages.push_back(sum / size);
  }
  return averages;
}

// Expects the gradients of w and v to be `averages`. `when` goes into the failure's message.
inline void expect_gradients(const Pair& pair, const std::vector<torch::Tensor>& averages,
                             const char* when) {
  const std::vector<torch::Tensor> got{pair->w.grad(), pair->v.grad()};
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(got[i].defined()) << when;
    EXPECT_TRUE(torch::allclose(got[i].resolve_conj(), averages[i], 1e-4, 1e-5))
        << when << ", parameter " << i;
  }
}

// Trains `pair` for three steps, and expects averaged_gradients() after each.
inline void check_steps(Pair pair, at::IntArrayRef sizes, const DdpOptions& options, int rank,
                        int size, at::ScalarType type = at::kDouble) {
  DistributedDataParallel model(pair, options);
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor x = input_of(rank, step, sizes, type);
    const auto averages = averaged_gradients(pair, x, size);
    pair->zero_grad();
    squared_norm(model(x)).backward();
    expect_gradients(pair, averages, "after a step");
  }
}

// Makes backward throw on rank 1 when it reaches `v`. Returns the number of the hook.
inline unsigned throw_on_rank_1(const torch::Tensor& v, int rank) {
  return v.register_hook([rank](const torch::Tensor& gradient) {
    if (rank == 1) throw std::runtime_error("on purpose");
    return gradient;
  });
}

// Three parameters. Without `all`, its forward uses only u.
struct TripleImpl : torch::nn::Module {
  torch::Tensor w{register_parameter("w", torch::ones({2}))};
  torch::Tensor v{register_parameter("v", torch::ones({2}))};
  torch::Tensor u{register_parameter("u", torch::ones({2}))};
  torch::Tensor forward(const torch::Tensor& x, bool all) {
    return all ? v.sum() * x * w + u : x * u;
  }
};
TORCH_MODULE(Triple);

}  // namespace paceline::test
