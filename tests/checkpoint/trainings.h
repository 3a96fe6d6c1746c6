#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <paceline/checkpoint_directory.h>
#include <paceline/collectives.h>
#include <paceline/data_loader.h>
#include <paceline/ddp.h>

#include "support/temporary_directory.h"

// Training programs that save checkpoints.
namespace paceline::test {

// With random numbers, and with buffers that training changes.
struct DropoutNetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(3, 8))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(8))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(8, 1))};
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::dropout(norm(first(x)).tanh(), 0.5, is_training()));
  }
};
TORCH_MODULE(DropoutNet);

struct Points {
  std::int64_t size() const { return 23; }
  at::Tensor get(std::int64_t i) {
    return (torch::arange(3, at::kFloat) + static_cast<float>(i)).sin();
  }
};

inline constexpr int kEpochs = 3;

// A training program. Everything in it is made anew for each run.
struct Training {
  explicit Training(int seed = 1) : model(make_net(seed)) {}
  static DropoutNet make_net(int seed) {
    torch::manual_seed(seed);
    return {};
  }

  DistributedDataParallel<DropoutNetImpl> model;
  torch::optim::AdamW adam{model.parameters(), 0.01};
  Points points{};
  data::DataLoader<Points> loader{points,
                                  data::DistributedSampler(points.size(), {.seed = 5}),
                                  {.batch_size = 3, .num_workers = 1}};
  std::int64_t step = 0;
  double loss_sum = 0;
  const States states{{"model", model},
                      {"adam", adam},
                      {"loader", loader},
                      {"step", step},
                      {"loss", Stateful(loss_sum).per_rank()}};

  // Calls `after_step` after each, which returns whether to go on.
  void run(const std::function<bool()>& after_step) {
    for (auto epoch = loader.epoch(); epoch < kEpochs; ++epoch) {
      for (auto& x : loader.epoch(epoch)) {
        adam.zero_grad();
        auto loss = (model(x) - x.sum(1, true)).square().mean();
        loss.backward();
        adam.step();
        loss_sum += loss.item<double>();
        ++step;
        if (!after_step()) return;
      }
      // What a loop does at the end of an epoch must not be skipped by a resumed one.
      adam.param_groups()[0].options().set_lr(0.01 / static_cast<double>(epoch + 2));
    }
  }
  // Everything that must have the same bits. Buffers only on rank 0: the next forward copies its
  // buffers to all ranks.
  std::vector<at::Tensor> result() {
    std::vector<at::Tensor> all{torch::tensor(loss_sum, at::kDouble), torch::tensor(step),
                                torch::rand({2})};
    for (const auto& parameter : model.parameters()) all.push_back(parameter.detach().clone());
    if (get_rank() > 0) return all;
    for (const auto& buffer : model.module()->buffers()) all.push_back(buffer.clone());
    return all;
  }
};

inline void expect_equal(const std::vector<at::Tensor>& got,
                         const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::equal(got[i], expected[i])) << i << ": " << got[i] << expected[i];
  }
}

class Checkpoints : public ::testing::Test {
 protected:
  std::filesystem::path path() const { return directory_.path() / "run"; }
  std::filesystem::path file(const char* step, const char* name) const {
    return path() / (std::string("step-00000000000") + step) / name;
  }
  static void damage(const std::filesystem::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1000, std::ios::end);
    const char byte = static_cast<char>(file.get());
    file.seekp(-1000, std::ios::end);
    file.put(static_cast<char>(byte ^ 1));
  }

  test::TemporaryDirectory directory_;
};

}  // namespace paceline::test
