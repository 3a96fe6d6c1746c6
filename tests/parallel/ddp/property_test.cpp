#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <thread>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/random_program.h"
#include "support/small_net.h"
#include "support/thoroughness.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::bytes_of;
using test::Choice;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::Program;
using test::ProgramNet;
using test::thoroughness;
using Zero = Program::Zero;

void zero_grad(torch::nn::Module& module, Zero how) {
  if (how != Zero::no) module.zero_grad(how == Zero::set_to_none);
}

// One process that does the work of all ranks: gradients of each rank's batches, added up in
// float64, with the weight of that rank.
class OneProcess {
 public:
  explicit OneProcess(const Program& program)
      : program_(program), sums_(program.parameters.size()), scales_(program.parameters.size()) {}

  // `values`: the parameters before the step.
  void run_step(int number, const std::vector<torch::Tensor>& values) {
    const auto& step = program_.steps[static_cast<std::size_t>(number)];
    ProgramNet net(program_);
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < values.size(); ++i) net->weights[i].copy_(values[i]);
    }
    for (int micro = 0; micro < static_cast<int>(step.forwards.size()); ++micro) {
      for (int rank = 0; rank < program_.size; ++rank) {
        net->zero_grad();
        auto loss = torch::zeros({}, at::kDouble);
        for (int f = 0; f < step.forwards[static_cast<std::size_t>(micro)]; ++f) {
          loss = loss + net(program_.batch(rank, number, micro, f), rank, number, micro);
        }
        loss.backward();
        add(net->weights, program_.weight(rank, step));
      }
    }
  }

  void expect_gradients(const std::vector<torch::Tensor>& parameters) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& got = parameters[i].grad();
      ASSERT_EQ(got.defined(), sums_[i].defined()) << "weight" << i;
      if (!got.defined()) continue;
      // A few roundings, of sums whose parts may be larger than they.
      const double epsilon = got.scalar_type() == at::kFloat
                                 ? std::numeric_limits<float>::epsilon()
                                 : std::numeric_limits<double>::epsilon();
      const auto off = (got.to(at::kDouble) - sums_[i]).abs() - 32 * epsilon * scales_[i];
      EXPECT_LE(off.max().item<double>(), 0) << "weight" << i << ' ' << got.sizes();
    }
  }

  void zero(Zero how) {
    for (auto* const tensors : {&sums_, &scales_}) {
      for (auto& tensor : *tensors) {
        if (how == Zero::set_to_none) tensor.reset();
        if (how == Zero::fill && tensor.defined()) tensor.zero_();
      }
    }
  }

 private:
  void add(const std::vector<torch::Tensor>& weights, double factor) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (!weights[i].grad().defined()) continue;
      const auto part = weights[i].grad().to(at::kDouble) * factor;
      sums_[i] = sums_[i].defined() ? sums_[i] + part : part;
      scales_[i] = scales_[i].defined() ? scales_[i] + part.abs() : part.abs();
    }
  }

  const Program& program_;
  std::vector<torch::Tensor> sums_;
  std::vector<torch::Tensor> scales_;  // of what was added up
};

// What must not change the gradients' bits.
DdpOptions random_options(const Program& program, int variant) {
  Choice choice(1000 * program.seed + static_cast<unsigned>(variant));
  const auto cap = [&] { return choice.of({1e-5, 0.001, 0.01, 0.1, 0.5, 2.0}); };
  DdpOptions options{.find_unused_parameters = program.unused || choice.one_in(4),
                     .gradient_as_bucket_view = choice.one_in(2)};
  options.static_graph = !options.find_unused_parameters && choice.one_in(4);
  options.skip_all_reduce_unused_params =
      options.find_unused_parameters && (program.everywhere || !program.unused) && choice.one_in(2);
  options.average = program.weighted ? Average::samples : Average::ranks;
  const int caps = choice.below(4);
  if (caps == 1) options.bucket_cap_mb = cap();
  for (int i = 1; i < caps; ++i) options.bucket_cap_mb_list.push_back(cap());
  return options;
}

void run_backwards(DistributedDataParallel<test::ProgramNetImpl>& model, const Program& program,
                   int rank, int number) {
  const auto& step = program.steps[static_cast<std::size_t>(number)];
  const int micros = static_cast<int>(step.forwards.size());
  for (int micro = 0; micro < micros; ++micro) {
    const auto guard = model.no_sync(micro + 1 < micros);
    auto loss = torch::zeros({}, at::kDouble);
    for (int f = 0; f < step.forwards[static_cast<std::size_t>(micro)]; ++f) {
      loss = loss + model(program.batch(rank, number, micro, f), rank, number, micro);
    }
    if (program.weighted && micro + 1 == micros) {
      model.set_samples(step.samples[static_cast<std::size_t>(rank)]);
    }
    loss.backward();
  }
}

// Gives the bytes of all gradients of all steps. Rank 0 checks them, where they are to be.
std::string run_program(const Program& program, const DdpOptions& options, int rank, bool check) {
  ProgramNet net(program);
  DistributedDataParallel model(net, options);
  OneProcess one(program);
  std::string bytes;
  for (int number = 0; number < static_cast<int>(program.steps.size()); ++number) {
    SCOPED_TRACE(fmt::format("step {}", number));
    if (check && rank == 0) one.run_step(number, net->weights);
    run_backwards(model, program, rank, number);
    if (check && rank == 0) one.expect_gradients(net->weights);
    const torch::NoGradGuard no_grad;
    for (auto& weight : net->weights) {
      if (!weight.grad().defined()) continue;
      bytes += bytes_of({weight.grad()});
      weight -= 0.01 * weight.grad();
    }
    const Zero how = program.steps[static_cast<std::size_t>(number)].after;
    zero_grad(*net, how);
    one.zero(how);
  }
  const auto hash = std::to_string(std::hash<std::string>{}(bytes));
  for (const auto& other : all_gather_bytes(hash)) EXPECT_EQ(other, hash) << "ranks differ";
  return bytes;
}

// With gradients from one process, and over shared memory with others of other options: a
// collective of another backend may add up in another order when sizes change.
void check_program(unsigned seed, const std::string& backend, int rank, int size) {
  const Program program(seed, size);
  const int variants = backend == "paceline" ? 3 : 1;
  std::string first;
  for (int variant = 0; variant < variants; ++variant) {
    SCOPED_TRACE(
        fmt::format("program {} of {} ranks on {}, options {}", seed, size, backend, variant));
    try {
      const auto bytes = run_program(program, random_options(program, variant), rank, variant == 0);
      if (variant == 0) first = bytes;
      EXPECT_TRUE(bytes == first) << "other options, other bits";
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      throw;
    }
  }
}

using DdpPropertyWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpPropertyWorlds, test::worlds(), test::CaseName());

TEST_P(DdpPropertyWorlds, AnyProgramEqualsOneProcessWithAnyBuckets) {
  const std::string& backend = GetParam().backend;
  const int size = GetParam().size;
  expect_torch_ranks(size, backend, [&](int rank, int n) {
    const unsigned programs = 2 * static_cast<unsigned>(thoroughness());
    for (unsigned i = 0; i < programs; ++i) {
      check_program(100 * i + static_cast<unsigned>(size), backend, rank, n);
    }
  });
}

struct ComplexNetImpl : torch::nn::Module {
  explicit ComplexNetImpl(at::ScalarType type) {
    torch::manual_seed(11);
    first = register_parameter("first", torch::randn({6, 500}, at::kComplexDouble).to(type));
    last = register_parameter("last", torch::randn({500, 2}, at::kComplexDouble).to(type));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::abs(torch::tanh(x.matmul(first) / 6).matmul(last)).mean();
  }
  torch::Tensor first, last;
};
TORCH_MODULE(ComplexNet);

torch::Tensor complex_batch(int rank, int step, at::ScalarType type) {
  torch::manual_seed(100 * static_cast<std::uint64_t>(step) + static_cast<std::uint64_t>(rank));
  return torch::randn({4, 6}, at::kComplexDouble).to(type);
}

using DdpPropertyWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpPropertyWorldsUpTo3, test::worlds({2, 3}), test::CaseName());

TEST_P(DdpPropertyWorldsUpTo3, ComplexParametersTrain) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(ComplexNet(at::kComplexFloat), {.bucket_cap_mb = 0.01});
    ComplexNet plain(at::kComplexDouble);
    torch::optim::SGD ours(model.parameters(), 0.1);
    torch::optim::SGD alone(plain->parameters(), 0.1);
    for (int step = 0; step < 5; ++step) {
      ours.zero_grad();
      alone.zero_grad();
      model(complex_batch(rank, step, at::kComplexFloat)).backward();
      for (int r = 0; r < n; ++r) {
        (plain(complex_batch(r, step, at::kComplexDouble)) / n).backward();
      }
      ours.step();
      alone.step();
    }
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(torch::allclose(model.parameters()[i].to(at::kComplexDouble),
                                  plain->parameters()[i], 1e-4, 1e-5));
    }
  });
}

struct Team {
  std::vector<int> ranks;
  ProcessGroup group;
  std::vector<std::vector<torch::Tensor>> batches;  // by step and rank
  std::vector<torch::Tensor> expected;
};

constexpr int kTeamSteps = 15;

// Of one process with the batches of the team. Random numbers belong to the process, so they are
// drawn before there are threads.
Team make_team(const std::vector<int>& ranks) {
  Team team{ranks, new_group(ranks), {}, {}};
  auto net = make_net(at::kDouble);
  torch::optim::SGD sgd(net->parameters(), 0.05);
  for (int step = 0; step < kTeamSteps; ++step) {
    team.batches.emplace_back();
    sgd.zero_grad();
    for (const int rank : ranks) {
      const auto x = batch_of(rank, 10 * step + static_cast<int>(ranks.size()), at::kDouble);
      team.batches.back().push_back(x);
      (loss_of(net(x), x) / static_cast<double>(ranks.size())).backward();
    }
    sgd.step();
  }
  team.expected = net->parameters();
  return team;
}

void train_in_team(const Team& team, const test::Net& net) {
  DistributedDataParallel model(
      net, {.process_group = team.group, .bucket_cap_mb = 0.001, .check_sync_every = 4});
  torch::optim::SGD sgd(model.parameters(), 0.05);
  for (const auto& batches : team.batches) {
    const auto& x = batches[static_cast<std::size_t>(get_rank(team.group))];
    sgd.zero_grad();
    loss_of(model(x), x).backward();
    sgd.step();
  }
  test::expect_close(model.parameters(), team.expected, 1e-12);
}

using DdpPropertyBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpPropertyBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(DdpPropertyBackends, ModelsOfSeveralGroupsTrainInThreads) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    std::vector<Team> teams;
    for (const auto& ranks :
         std::vector<std::vector<int>>{{0, 1, 2, 3}, {0, 2}, {1, 2, 3}, {1, 3}, {0, 1, 2, 3}}) {
      teams.push_back(make_team(ranks));
    }
    std::vector<std::thread> threads;
    for (const auto& team : teams) {
      if (!team.group.is_member()) continue;
      threads.emplace_back([&team, rank, net = make_net(at::kDouble)] {
        try {
          train_in_team(team, net);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

}  // namespace
}  // namespace paceline
