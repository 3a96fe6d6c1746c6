#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <set>
#include <stdexcept>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "support/random_program.h"
#include "support/small_net.h"
#include "support/thoroughness.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::batch_of;
using test::bytes_of;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::Program;
using test::ProgramNet;
using test::run_torch_ranks;
using test::thoroughness;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Zero = Program::Zero;

at::Generator cpu_generator() {
  return at::globalContext().defaultGenerator(at::kCPU);
}

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

// Runs `body` on each of these numbers of ranks over shared memory, on some of them over Gloo and
// across nodes too, and expects the same result from every rank.
void expect_same_everywhere(const std::vector<int>& sizes,
                            const std::function<std::string()>& body) {
  std::set<std::string> results;
  std::vector<std::string> backends = test::backends();
  if (is_gloo_available()) backends.emplace_back(test::kAcrossNodes);
  for (const int size : sizes) {
    for (const std::string& backend : backends) {
      const bool is_some = size == 2 || size == 5 || (size == sizes.back() && backend == "gloo");
      if (backend != "paceline" && !is_some) continue;
      const auto ends = run_torch_ranks(size, backend, [&](const test::RankContext& context) {
        const auto world = init_process_group(context.init);
        return body();
      });
      for (const auto& end : ends) {
        EXPECT_TRUE(end.exited_cleanly()) << end.report;
        results.insert(end.report);
        EXPECT_EQ(results.size(), 1u) << size << " ranks over " << backend;
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
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
  expect_same_everywhere({1, 5, 12}, [] { return run_programs(12, 3); });
}

constexpr int kLogical = 6;
constexpr int kSteps = 3;

void step_by(double rate, const std::vector<torch::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : parameters) {
    parameter.sub_(parameter.grad() * rate);
    parameter.mutable_grad().reset();
  }
}

// The gradients of all logical ranks in the documented order, accumulated in float32.
std::vector<torch::Tensor> half_gradients(test::Net& net, int step, at::ScalarType type) {
  std::vector<std::vector<torch::Tensor>> leaves;
  for (int rank = 0; rank < kLogical; ++rank) {
    net->zero_grad();
    const auto x = batch_of(rank, step, type);
    loss_of(net(x), x).backward();
    leaves.emplace_back();
    for (const auto& one : net->parameters()) leaves.back().push_back(one.grad().to(at::kFloat));
  }
  std::vector<torch::Tensor> averages;
  for (std::size_t i = 0; i < leaves[0].size(); ++i) {
    const auto sum = [&](std::size_t a, std::size_t b) { return leaves[a][i] + leaves[b][i]; };
    averages.push_back((((sum(0, 1) + sum(2, 3)) + sum(4, 5)) / kLogical).to(type));
  }
  return averages;
}

std::string train_half(at::ScalarType type) {
  auto net = make_net(type);
  auto alone = make_net(type);
  DistributedDataParallel model(net, {.bucket_cap_mb = 0.001, .logical_ranks = kLogical});
  std::string bytes;
  for (int step = 0; step < kSteps; ++step) {
    for (const int rank : model.logical_ranks()) {
      const auto x = batch_of(rank, step, type);
      loss_of(model(x), x).backward();
    }
    if (get_world_size() == 1) {
      std::vector<torch::Tensor> got;
      for (const auto& one : net->parameters()) got.push_back(one.grad());
      EXPECT_TRUE(bytes_of(got) == bytes_of(half_gradients(alone, step, type))) << "step " << step;
    }
    step_by(0.01, net->parameters());
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      alone->parameters()[i].copy_(net->parameters()[i]);
    }
    bytes += bytes_of(net->parameters());
  }
  return std::to_string(std::hash<std::string>{}(bytes));
}

TEST(LogicalRanks, HalfTypesAreRoundedOnce) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    expect_same_everywhere({1, 2, 3, 4, 6}, [=] { return train_half(type); });
  }
}

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool sparse)
      : words(register_module(
            "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(50, 4).sparse(sparse)))),
        last(register_module("last", torch::nn::Linear(4, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last(words(x).tanh()); }
  torch::nn::Embedding words;
  torch::nn::Linear last;
};
TORCH_MODULE(Words);

torch::Tensor words_of(int rank, int step) {
  auto random = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank));
  return torch::randint(50, {7}, random, at::kLong);
}

TEST(LogicalRanks, SparseGradientsAreAddedUpAsLeaves) {
  for (const bool weighted : {false, true}) {
    expect_same_everywhere({1, 2, 4, 6}, [=] {
      torch::manual_seed(1);
      Words net(true);
      torch::manual_seed(1);
      Words dense(false);
      DistributedDataParallel model(net, {.average = weighted ? Average::samples : Average::ranks,
                                          .logical_ranks = kLogical});
      const auto samples = [=](int rank) { return weighted ? rank % 3 * 1.5 : 1.0; };
      for (int step = 0; step < kSteps; ++step) {
        for (const int rank : model.logical_ranks()) {
          if (weighted) model.set_samples(samples(rank));
          model(words_of(rank, step)).pow(2).sum().backward();
        }
        double total = 0;
        for (int rank = 0; rank < kLogical; ++rank) {
          total += samples(rank);
          (dense(words_of(rank, step)).pow(2).sum() * samples(rank)).backward();
        }
        EXPECT_TRUE(net->words->weight.grad().is_sparse());
        EXPECT_TRUE(torch::allclose(net->words->weight.grad().to_dense(),
                                    dense->words->weight.grad() / total, 1e-5, 1e-6));
        step_by(0.1, net->parameters());
        step_by(0.1 / total, dense->parameters());
      }
      return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
    });
  }
}

// Trains with dropout; `between` runs before each step.
std::string train_with_dropout(const std::function<void(LogicalRanks&, int)>& between) {
  auto net = make_net(at::kFloat);
  torch::manual_seed(7);
  DistributedDataParallel model(net, {.logical_ranks = kLogical});
  for (int step = 0; step < kSteps; ++step) {
    LogicalRanks logical(model.logical_ranks());
    if (between) between(logical, step);
    for (const int rank : model.logical_ranks()) {
      const auto state = cpu_generator().get_state();
      const auto x = batch_of(rank, step, at::kFloat);
      cpu_generator().set_state(state);
      const auto output = model(torch::dropout(x, 0.5, true));
      loss_of(output, x).backward();
    }
    step_by(0.1, net->parameters());
  }
  return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
}

TEST(LogicalRanks, MayBeAssignedAnewBetweenSteps) {
  expect_same_everywhere({1, 2, 3}, [] {
    const std::string expected = train_with_dropout({});
    std::vector<double> carried(kLogical, -1);
    const std::string moved = train_with_dropout([&](LogicalRanks& logical, int step) {
      if (step == 0) {
        logical.register_state(
            "a", [&](int rank) { return torch::tensor(carried[static_cast<std::size_t>(rank)]); },
            [&](int rank, const at::Tensor& value) {
              carried[static_cast<std::size_t>(rank)] = value.item<double>();
            });
        const auto [first, count] = logical.range();
        for (int rank = first; rank < first + count; ++rank) {
          carried[static_cast<std::size_t>(rank)] = 10 * rank;
        }
        return;
      }
      // The last rank gets the first logical ranks, and all but one of them.
      const int size = get_world_size();
      const int most = kLogical - size + 1;
      const int rank = size - 1 - get_rank();
      logical.assign(rank == 0 ? LogicalRange{0, most} : LogicalRange{most + rank - 1, 1});
      const auto [first, count] = logical.range();
      for (int one = first; one < first + count; ++one) {
        EXPECT_EQ(carried[static_cast<std::size_t>(one)], 10 * one);
      }
    });
    EXPECT_EQ(moved, expected);
    return moved;
  });
}

// Where each rank runs one logical rank, too.
TEST(LogicalRanks, MayBePermutedAmongRanks) {
  for (const bool weighted : {false, true}) {
    expect_same_everywhere({1, 2, 5}, [=] {
      auto net = make_net(at::kFloat);
      DistributedDataParallel model(
          net, {.average = weighted ? Average::samples : Average::ranks, .logical_ranks = 5});
      const auto [first, count] = model.logical_ranks().range();
      model.logical_ranks().assign({5 - first - count, count});
      for (int step = 0; step < kSteps; ++step) {
        for (const int rank : model.logical_ranks()) {
          if (weighted) model.set_samples(rank * rank);
          const auto x = batch_of(rank, step, at::kFloat);
          loss_of(model(x), x).backward();
        }
        step_by(0.1, net->parameters());
      }
      return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
    });
  }
}

TEST(LogicalRanks, StatesGoOnInAnotherModel) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    DistributedDataParallel other(make_net(at::kFloat), {.logical_ranks = 4});
    std::vector<torch::Tensor> drawn;
    for (const int rank : model.logical_ranks()) {
      static_cast<void>(rank);
      torch::randn({3});
    }
    const auto [first, count] = model.logical_ranks().range();
    for (int rank = first; rank < first + count; ++rank) {
      other.logical_ranks().set_state(rank, model.logical_ranks().state(rank));
    }
    for (const int rank : model.logical_ranks()) {
      static_cast<void>(rank);
      drawn.push_back(torch::randn({3}));
    }
    EXPECT_FALSE(drawn[0].equal(drawn[1]));
    for (const int rank : other.logical_ranks()) {
      EXPECT_TRUE(torch::randn({3}).equal(drawn[static_cast<std::size_t>(rank - first)]));
    }
  });
}

TEST(LogicalRanks, LeaveTheProcessItsOwnRandomNumbers) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    torch::manual_seed(5);
    const auto expected = torch::randn({4});
    torch::manual_seed(5);
    for (const int rank : model.logical_ranks()) torch::randn({rank + 1});
    EXPECT_TRUE(torch::randn({4}).equal(expected));
    torch::manual_seed(5);
    EXPECT_THROW(
        {
          for (const int rank : model.logical_ranks()) {
            torch::randn({rank + 1});
            throw std::runtime_error("a sample is broken");
          }
        },
        std::runtime_error);
    EXPECT_TRUE(torch::randn({4}).equal(expected));
  });
}

TEST(LogicalRanks, AreTheRanksWithoutTheOption) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    auto net = make_net(at::kFloat);
    DistributedDataParallel model(net);
    std::vector<int> seen;
    for (const int logical : model.logical_ranks()) {
      seen.push_back(logical);
      const auto x = batch_of(logical, 0, at::kFloat);
      loss_of(model(x), x).backward();
    }
    EXPECT_EQ(seen, std::vector{rank});
    EXPECT_EQ(model.logical_ranks().total(), size);
    EXPECT_EQ(model.logical_ranks().range().first, rank);
    EXPECT_EQ(model.stats().steps, 1u);
  });
}

enum class Failure { before_forward, forward, backward };

torch::nn::Sequential make_stateful_net() {
  torch::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Linear(9, 20), torch::nn::BatchNorm1d(20),
                               torch::nn::Dropout(0.3), torch::nn::Linear(20, 2));
}

// Runs a step; the logical rank `failing` throws.
template <typename Model>
void run_step(Model& model, int step, int failing, Failure failure) {
  for (const int rank : model.logical_ranks()) {
    const auto random = cpu_generator().get_state();
    const auto x = batch_of(rank, step, at::kFloat);
    cpu_generator().set_state(random);
    if (rank == failing && failure == Failure::before_forward) throw std::runtime_error("no data");
    const auto output = model(x);
    if (rank == failing && failure == Failure::forward) throw std::runtime_error("no loss");
    if (rank == failing) {
      output.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no gradient"); });
    }
    loss_of(output, x).backward();
  }
}

// A step that an exception ends on one rank, and then on all, is repeated.
std::string train_with_failures(bool trains, Failure failure) {
  constexpr int kOf = 5;
  auto net = make_stateful_net();
  torch::manual_seed(9);
  DistributedDataParallel model(net, {.logical_ranks = kOf});
  net->train(trains);
  for (int step = 0; step < 3; ++step) {
    for (const int failing : {0, 1, 4}) {
      EXPECT_ANY_THROW(run_step(model, step, failing, failure)) << failing;
      EXPECT_TRUE(net[0]->as<torch::nn::Linear>()->weight.grad().defined() == (step > 0));
    }
    run_step(model, step, -1, failure);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.sub_(parameter.grad() * 0.1);
    net->zero_grad(false);
  }
  auto tensors = net->parameters();
  for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
  return std::to_string(std::hash<std::string>{}(bytes_of(tensors)));
}

TEST(LogicalRanks, GoOnAfterAnExceptionInAStep) {
  for (const auto failure : {Failure::before_forward, Failure::forward, Failure::backward}) {
    SCOPED_TRACE(static_cast<int>(failure));
    expect_same_everywhere({1, 2, 3, 5}, [=] { return train_with_failures(true, failure); });
  }
  expect_same_everywhere({1, 2, 5}, [] { return train_with_failures(false, Failure::backward); });
}

// The step is complete then, on all ranks.
TEST(LogicalRanks, GoOnAfterAnExceptionBehindTheLastBackward) {
  expect_same_everywhere({1, 2, 3}, [] {
    auto net = make_stateful_net();
    torch::manual_seed(9);
    DistributedDataParallel model(net, {.logical_ranks = 3});
    for (int step = 0; step < 3; ++step) {
      const auto run = [&] {
        for (const int rank : model.logical_ranks()) {
          const auto random = cpu_generator().get_state();
          const auto x = batch_of(rank, step, at::kFloat);
          cpu_generator().set_state(random);
          loss_of(model(x), x).backward();
          if (rank == 2) throw std::runtime_error("cannot write the log");
        }
      };
      const auto [first, count] = model.logical_ranks().range();
      if (first + count == 3) {
        EXPECT_THROW(run(), std::runtime_error);
      } else {
        run();
      }
      step_by(0.1, net->parameters());
    }
    auto tensors = net->parameters();
    for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
    return std::to_string(std::hash<std::string>{}(bytes_of(tensors)));
  });
}

TEST(LogicalRanks, MayBeAssignedAnewAfterAnException) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_stateful_net(), {.logical_ranks = 4});
    EXPECT_ANY_THROW(run_step(model, 0, 1, Failure::forward));
    model.logical_ranks().assign(rank == 0 ? LogicalRange{0, 3} : LogicalRange{3, 1});
    for (int step = 0; step < 2; ++step) run_step(model, step, -1, Failure::forward);
    EXPECT_EQ(model.stats().steps, 2u);
  });
}

template <typename Model>
torch::Tensor forward_of(Model& model, int rank, int step) {
  const auto state = cpu_generator().get_state();
  const auto x = batch_of(rank, step, at::kFloat);
  cpu_generator().set_state(state);
  return loss_of(model(x), x);
}

std::string train_stateful(bool with_other_forwards) {
  auto net = make_stateful_net();
  net[2]->as<torch::nn::Dropout>()->options.p(0);
  DistributedDataParallel model(net, {.logical_ranks = 4});
  for (int step = 0; step < 3; ++step) {
    if (with_other_forwards) {
      const torch::NoGradGuard no_grad;
      for (const int rank : model.logical_ranks()) forward_of(model, rank, step);
    }
    for (const int rank : model.logical_ranks()) {
      forward_of(model, rank, step).backward();
      const torch::NoGradGuard no_grad;
      if (with_other_forwards) forward_of(model, rank, step + 1);
    }
    step_by(0.1, net->parameters());
  }
  auto tensors = net->parameters();
  for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
  return std::to_string(std::hash<std::string>{}(bytes_of(tensors)));
}

// Neither a loop without a backward nor a forward after it changes buffers, on any number of ranks.
TEST(LogicalRanks, KeepTheBuffersOfTheSynchronisedBackward) {
  expect_same_everywhere({1, 2, 3, 4}, [] {
    const auto result = train_stateful(true);
    EXPECT_EQ(result, train_stateful(false));
    return result;
  });
}

// What is allowed with one logical rank each is allowed with several.
TEST(LogicalRanks, MayRunForwardsBehindTheBackwardAndAccumulateOutside) {
  for (const auto average : {Average::ranks, Average::samples}) {
    expect_same_everywhere({1, 2, 3}, [=] {
      auto net = make_net(at::kFloat);
      DistributedDataParallel model(net, {.average = average, .logical_ranks = 3});
      for (int step = 0; step < 3; ++step) {
        {
          net->eval();
          const auto guard = model.no_sync();
          forward_of(model, 7, step).backward();
          net->train();
        }
        for (const int rank : model.logical_ranks()) {
          if (average == Average::samples) model.set_samples(rank + 1);
          forward_of(model, rank, step).backward();
          forward_of(model, rank, step);
        }
        step_by(0.1, net->parameters());
      }
      return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
    });
  }
}

// The most leaves that there may be; complex numbers; and a parameter without elements.
TEST(LogicalRanks, SixtyFourOfUnusualParameters) {
  expect_same_everywhere({1, 2, 3}, [] {
    torch::manual_seed(8);
    const auto number = torch::randn({5, 3}, at::kComplexFloat).requires_grad_();
    const auto empty = torch::randn({0, 4}).requires_grad_();
    const auto apart = torch::randn({0}, at::kDouble).requires_grad_();
    DistributedDataParallel model(
        {{"number", number}, {"empty", empty}, {"apart", apart}},
        [&](const at::Tensor& x) { return (number * x).abs().sum() + empty.sum() + apart.sum(); },
        DdpOptions{.logical_ranks = 64});
    std::string bytes;
    for (int step = 0; step < 2; ++step) {
      for (const int rank : model.logical_ranks()) {
        model(torch::full({3}, 0.1 * rank + step)).backward();
      }
      const auto expected = number.detach() / number.detach().abs() *
                            (0.1 * 31.5 + step);  // of the mean of the losses
      EXPECT_TRUE(torch::allclose(number.grad(), expected, 1e-5));
      EXPECT_EQ(empty.grad().sizes(), empty.sizes());
      bytes += bytes_of({number.grad()});
      step_by(0.1, {number, empty, apart});
    }
    return std::to_string(std::hash<std::string>{}(bytes));
  });
}

TEST(LogicalRanks, KeepTheProgramsGradientTensors) {
  expect_same_everywhere({1, 2, 4}, [] {
    auto net = make_net(at::kFloat);
    DistributedDataParallel model(net, {.gradient_as_bucket_view = false, .logical_ranks = 4});
    std::vector<torch::Tensor> own;
    for (auto& parameter : net->parameters()) {
      own.push_back(torch::zeros_like(parameter));
      parameter.mutable_grad() = own.back();
    }
    for (const int rank : model.logical_ranks()) {
      const auto x = batch_of(rank, 0, at::kFloat);
      loss_of(model(x), x).backward();
    }
    std::vector<torch::Tensor> grads;
    for (const auto& parameter : net->parameters()) grads.push_back(parameter.grad());
    EXPECT_TRUE(bytes_of(own) == bytes_of(grads));
    EXPECT_GT(own[0].abs().max().item<float>(), 0);
    return std::to_string(std::hash<std::string>{}(bytes_of(own)));
  });
}

}  // namespace
}  // namespace paceline
