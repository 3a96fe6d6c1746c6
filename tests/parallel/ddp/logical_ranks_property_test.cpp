#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/random_program.h"
#include "support/same_everywhere.h"
#include "support/small_net.h"
#include "support/thoroughness.h"

namespace paceline {
namespace {

using test::bytes_of;
using test::cpu_generator;
using test::expect_same_everywhere;
using test::Program;
using test::ProgramNet;
using test::thoroughness;
using Zero = Program::Zero;

// Program::batch seeds the process's generator.
torch::Tensor logical_batch(const Program& program, int rank, int step, int micro, int forward) {
  const auto state = cpu_generator().get_state();
  auto result = program.batch(rank, step, micro, forward);
  cpu_generator().set_state(state);
  return result;
}

// A random program with dropout, and a buffer that each forward reads and writes.
struct RandomNetImpl : torch::nn::Module {
  explicit RandomNetImpl(const Program& program)
      : net(register_module("net", ProgramNet(program))),
        running(register_buffer("running", torch::ones({test::kWidth}, at::kDouble))) {}
  torch::Tensor forward(const torch::Tensor& x, int rank, int step, int micro) {
    const auto input = torch::dropout(x * running.clone(), 0.25, is_training());
    const torch::NoGradGuard no_grad;
    running.lerp_(x.mean(0), 0.1);
    const torch::AutoGradMode grad(true);
    return net(input, rank, step, micro);
  }
  ProgramNet net;
  torch::Tensor running;
};
TORCH_MODULE(RandomNet);

DdpOptions options_of(const Program& program) {
  return {.bucket_cap_mb = 0.01,
          .find_unused_parameters = program.unused,
          .gradient_as_bucket_view = program.seed % 3 != 0,
          .static_graph = !program.unused && program.seed % 2 == 0,
          .zero_copy = program.seed % 5 != 0,
          .average = program.weighted ? Average::samples : Average::ranks,
          .logical_ranks = program.size};
}

// The backwards of one logical rank, the last one synchronised where `model` synchronises.
template <typename Model, typename Guard>
void run_logical_rank(Model& model, const Program& program, int rank, int number, Guard guard_of) {
  const auto& step = program.steps[static_cast<std::size_t>(number)];
  const int micros = static_cast<int>(step.forwards.size());
  for (int micro = 0; micro < micros; ++micro) {
    const auto guard = guard_of(micro + 1 < micros);
    auto loss = torch::zeros({}, at::kDouble);
    for (int f = 0; f < step.forwards[static_cast<std::size_t>(micro)]; ++f) {
      loss = loss + model(logical_batch(program, rank, number, micro, f), rank, number, micro);
    }
    loss.backward();
  }
}

// One process that computes each logical rank's gradients by themselves, and adds them up in the
// documented order with LibTorch's operators.
class LeafByLeaf {
 public:
  LeafByLeaf(const Program& program, std::vector<at::Tensor> random)
      : program_(program), random_(std::move(random)) {}

  // `net`: the model before the step; gets the averages and logical rank 0's buffers.
  void run_step(RandomNet& net, int number) {
    const auto outside = cpu_generator().get_state();
    std::vector<RandomNet> leaves;
    for (int rank = 0; rank < program_.size; ++rank) {
      leaves.push_back(copy_of(net));
      at::Tensor& random = random_[static_cast<std::size_t>(rank)];
      cpu_generator().set_state(random);
      run_logical_rank(leaves.back(), program_, rank, number,
                       [](bool) { return NoSyncGuard(nullptr, false); });
      random = cpu_generator().get_state();
    }
    cpu_generator().set_state(outside);
    for (std::size_t i = 0; i < net->net->weights.size(); ++i) average(net, leaves, i, number);
    const torch::NoGradGuard no_grad;
    net->running.copy_(leaves[0]->running);
  }

 private:
  RandomNet copy_of(const RandomNet& net) const {
    RandomNet copy(program_);
    const torch::NoGradGuard no_grad;
    copy->running.copy_(net->running);
    for (std::size_t i = 0; i < net->net->weights.size(); ++i) {
      const auto& weight = net->net->weights[i];
      copy->net->weights[i].copy_(weight);
      if (weight.grad().defined()) copy->net->weights[i].mutable_grad() = weight.grad().clone();
    }
    return copy;
  }

  bool is_used(std::size_t parameter, int number) const {
    if (program_.parameters[parameter].frozen) return false;
    const auto micros = program_.steps[static_cast<std::size_t>(number)].forwards.size();
    for (std::size_t layer = 0; layer < program_.layers.size(); ++layer) {
      if (program_.layers[layer].parameter != parameter) continue;
      for (int rank = 0; rank < program_.size; ++rank) {
        for (int micro = 0; micro < static_cast<int>(micros); ++micro) {
          if (program_.runs(layer, rank, number, micro)) return true;
        }
      }
    }
    return false;
  }

  void average(RandomNet& net, const std::vector<RandomNet>& leaves, std::size_t i,
               int number) const {
    const torch::NoGradGuard no_grad;
    const auto& parameter = net->net->weights[i];
    if (!is_used(i, number)) return;
    const auto& samples = program_.steps[static_cast<std::size_t>(number)].samples;
    double divisor = 0;
    std::vector<std::optional<torch::Tensor>> nodes;
    for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
      const double weight = program_.weighted ? samples[leaf] : 1;
      divisor += weight;
      const auto& grad = leaves[leaf]->net->weights[i].grad();
      nodes.emplace_back();
      if (weight != 0) {
        nodes.back() = (grad.defined() ? grad : torch::zeros_like(parameter)) * weight;
      }
    }
    for (; nodes.size() > 1;) {
      std::vector<std::optional<torch::Tensor>> above;
      for (std::size_t k = 0; k < nodes.size(); k += 2) {
        const auto right = k + 1 < nodes.size() ? nodes[k + 1] : std::nullopt;
        above.push_back(nodes[k] && right ? *nodes[k] + *right : nodes[k] ? nodes[k] : right);
      }
      nodes = std::move(above);
    }
    parameter.mutable_grad() = *nodes[0] / divisor;
  }

  const Program& program_;
  std::vector<at::Tensor> random_;  // by logical rank
};

void descend(RandomNet& net, Zero how) {
  const torch::NoGradGuard no_grad;
  for (auto& weight : net->net->weights) {
    if (weight.grad().defined()) weight -= 0.01 * weight.grad();
  }
  if (how != Zero::no) net->zero_grad(how == Zero::set_to_none);
}

std::vector<torch::Tensor> state_of(const RandomNet& net) {
  auto tensors = net->parameters();
  for (const auto& weight : net->net->weights) {
    if (weight.grad().defined()) tensors.push_back(weight.grad());
  }
  tensors.push_back(net->running);
  return tensors;
}

std::vector<at::Tensor> random_states(LogicalRanks logical) {
  std::vector<at::Tensor> states;
  for (int rank = 0; rank < logical.total(); ++rank) states.push_back(logical.state(rank).random);
  return states;
}

// Runs a program; a single rank compares each step with LeafByLeaf. Returns what all steps gave.
std::string run_program(const Program& program) {
  torch::manual_seed(program.seed);
  RandomNet net(program);
  RandomNet expected(program);
  torch::manual_seed(program.seed);
  DistributedDataParallel model(net, options_of(program));
  std::optional<LeafByLeaf> one;
  if (get_world_size() == 1) one.emplace(program, random_states(model.logical_ranks()));
  std::string bytes;
  for (int number = 0; number < static_cast<int>(program.steps.size()); ++number) {
    const auto& step = program.steps[static_cast<std::size_t>(number)];
    for (const int rank : model.logical_ranks()) {
      if (program.weighted) model.set_samples(step.samples[static_cast<std::size_t>(rank)]);
      run_logical_rank(model, program, rank, number,
                       [&](bool local) { return model.no_sync(local); });
    }
    if (one) {
      one->run_step(expected, number);
      EXPECT_TRUE(bytes_of(state_of(net)) == bytes_of(state_of(expected))) << "step " << number;
    }
    bytes += bytes_of(state_of(net));
    descend(net, step.after);
    descend(expected, step.after);
  }
  const auto hash = std::to_string(std::hash<std::string>{}(bytes));
  for (const auto& other : all_gather_bytes(hash)) EXPECT_EQ(other, hash) << "ranks differ";
  return hash;
}

// Runs random programs of so many logical ranks.
std::string run_programs(int logical, int programs) {
  std::string results;
  for (int i = 0; i < programs * thoroughness(); ++i) {
    const Program program(static_cast<unsigned>(1000 * logical + i), logical);
    SCOPED_TRACE(fmt::format("program {}", program.seed));
    results += run_program(program) + " ";
  }
  return results;
}

TEST(LogicalRanks, EightGiveTheSameBitsOnAnyNumberOfRanks) {
  expect_same_everywhere({1, 2, 3, 4, 5, 6, 7, 8}, [] { return run_programs(8, 5); });
}

TEST(LogicalRanks, TwelveGiveTheSameBitsOnAnyNumberOfRanks) {
  expect_same_everywhere({1, 2, 3, 4, 5, 6, 12}, [] { return run_programs(12, 3); });
}

}  // namespace
}  // namespace paceline
