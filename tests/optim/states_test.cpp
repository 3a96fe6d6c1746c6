// States that Python saved, states that go through files, and averages beside
// DistributedDataParallel: what needs the whole library.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/checkpoint_directory.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/exponential_moving_average.h>
#include <paceline/lr_scheduler.h>
#include <paceline/optimizers.h>

#include "optim/optimizer_cases.h"
#include "optim/schedules.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline::optim {
namespace {

using namespace test;

// Whether all that Python's value has is in ours, too.
bool includes(const at::IValue& ours, const at::IValue& pythons) {
  const auto number = [](const at::IValue& value) {
    return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
  };
  if (pythons.isGenericDict()) {
    const auto dict = pythons.toGenericDict();
    return ours.isGenericDict() && std::all_of(dict.begin(), dict.end(), [&](const auto& one) {
             const auto own = ours.toGenericDict();
             return own.contains(one.key()) && includes(own.at(one.key()), one.value());
           });
  }
  if (pythons.isList()) {
    return ours.isList() && ours.toListRef().size() == pythons.toListRef().size() &&
           std::ranges::equal(ours.toListRef(), pythons.toListRef(), includes);
  }
  if (pythons.isDouble() || pythons.isInt()) {
    return (ours.isDouble() || ours.isInt()) &&
           std::abs(number(ours) - number(pythons)) <= 1e-12 * std::abs(number(pythons));
  }
  return ours == pythons;
}

TEST(LRSchedulerState, IsThatOfPythonAndGoesOn) {
  const auto states = pickle_load(FILES_DIRECTORY "/schedules.pt").toGenericDict();
  ASSERT_EQ(states.size(), expected_rates().size());
  for (const ExpectedRates& expected : expected_rates()) {
    SCOPED_TRACE(expected.schedule);
    const auto state = states.at(expected.schedule + " " + expected.optimizer).toGenericDict();
    const auto optimizer = make_optimizer(expected.optimizer);
    const auto schedule = make_schedule(*optimizer, expected.schedule);
    for (int epoch = 0; epoch < kSavedAfter; ++epoch) schedule->step();
    EXPECT_TRUE(includes(schedule->state_dict(), state.at("schedule")))
        << schedule->state_dict() << "\n"
        << state.at("schedule");

    const auto other_optimizer = make_optimizer(expected.optimizer);
    const auto other = make_schedule(*other_optimizer, expected.schedule);
    other->load_state_dict(state.at("schedule"));
    load_state_dict(*other_optimizer, state.at("optimizer"));
    for (std::size_t epoch = kSavedAfter; epoch < expected.rates.size(); ++epoch) {
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_NEAR(rates_of(*other_optimizer)[i], expected.rates[epoch][i],
                    1e-12 * std::abs(expected.rates[epoch][i]));
        EXPECT_NEAR(momenta_of(*other_optimizer)[i], expected.momenta[epoch][i], 1e-12);
      }
      other->step();
    }
  }
}

TEST(OptimizersState, OfPythonGoesOn) {
  const auto states = pickle_load(FILES_DIRECTORY "/optimizers.pt").toGenericDict();
  for (const ExpectedParameters& expected : expected_parameters()) {
    auto parameters = make_parameters(expected.name);
    // With other options, which the state replaces.
    const auto optimizer =
        make_optimizer(has(expected.name, "AdamW") ? "AdamW default" : "Muon default", parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].set_data(torch::tensor(expected.half[i], at::kDouble)
                                 .view(parameters[i].sizes())
                                 .to(parameters[i].scalar_type()));
    }
    load_state_dict(*optimizer, states.at(expected.name));
    train(parameters, *optimizer, kSteps / 2, kSteps);
    expect_parameters(parameters, expected.whole, expected.name);
  }
}

TEST(OptimizersState, GoesOnFromAFileAfterAnyStep) {
  const paceline::test::TemporaryDirectory directory;
  const auto path = directory.path() / "state.pt";
  for (const std::string name : {"AdamW amsgrad float32 fused", "Muon options float32"}) {
    for (int interrupted = 0; interrupted < kSteps; ++interrupted) {
      auto parameters = make_parameters(name);
      const auto optimizer = make_optimizer(name, parameters);
      train(parameters, *optimizer, 0, interrupted);
      pickle_save(state_dict(*optimizer), path);
      auto others = make_parameters(name);
      for (std::size_t i = 0; i < others.size(); ++i) {
        others[i].set_data(parameters[i].detach().clone());
      }
      const auto other = make_optimizer(has(name, "AdamW") ? "AdamW default" : "Muon rms", others);
      load_state_dict(*other, pickle_load(path));
      train(parameters, *optimizer, interrupted, kSteps);
      train(others, *other, interrupted, kSteps);
      for (std::size_t i = 0; i < others.size(); ++i) {
        EXPECT_TRUE(torch::equal(others[i], parameters[i])) << name << " " << interrupted;
      }
    }
  }
}

TEST(ExponentialMovingAverageState, OfPythonIsTaken) {
  const auto states = pickle_load(FILES_DIRECTORY "/optimizers.pt").toGenericDict();
  const torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  ExponentialMovingAverage average(net);
  const at::IValue state = states.at("average True");
  average.load_state_dict(state);
  EXPECT_EQ(average.n_averaged(), 5);
  EXPECT_TRUE(torch::equal(average.averages()["1.running_mean"],
                           state.toGenericDict().at("module.1.running_mean").toTensor()));
  EXPECT_EQ(average.state_dict().toGenericDict().size(), state.toGenericDict().size());
}

// As a CheckpointDirectory saves and loads them.
TEST(Stateful, TakesSchedulesAndAverages) {
  const paceline::test::TemporaryDirectory directory;
  const auto path = directory.path() / "states.pt";
  const auto tensor = torch::ones({2}, at::requires_grad());
  torch::optim::SGD sgd({tensor}, 0.1);
  StepLR schedule(sgd, {.step_size = 1});
  ExponentialMovingAverage average({{"x", tensor}});
  schedule.step();
  average.update();
  const States states{{"optimizer", sgd}, {"schedule", schedule}, {"average", average}};
  c10::impl::GenericList saved(c10::AnyType::get());
  for (const auto& one : states) saved.push_back(one.second.state_dict());
  pickle_save(saved, path);
  schedule.step();
  average.update();
  const at::IValue loaded = pickle_load(path);
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i].second.load_state_dict(loaded.toListRef()[i]);
  }
  EXPECT_EQ(schedule.last_epoch(), 1);
  EXPECT_EQ(average.n_averaged(), 1);
  EXPECT_NEAR(sgd.param_groups()[0].options().get_lr(), 0.01, 1e-12);
}

TEST(ExponentialMovingAverage, IsTheSameOnAllRanks) {
  paceline::test::expect_torch_ranks(2, "paceline", [](int rank, int /*size*/) {
    torch::manual_seed(static_cast<std::uint64_t>(rank));
    DistributedDataParallel model(torch::nn::Linear(3, 2));
    torch::optim::SGD sgd(model.parameters(), 0.1);
    ExponentialMovingAverage average(*model.module(), {.decay = 0.5});
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      model(torch::randn({4, 3})).pow(2).sum().backward();
      sgd.step();
      average.update();
    }
    for (const auto& one : average.averages()) {
      const std::vector<at::Tensor> all{torch::empty_like(one.value()),
                                        torch::empty_like(one.value())};
      all_gather(all, one.value());
      EXPECT_TRUE(torch::equal(all[0], all[1])) << one.key();
    }
    const auto own = model.module()->weight.detach().clone();
    {
      const auto applied = average.apply();
      EXPECT_TRUE(torch::equal(model.module()->weight, average.averages()["weight"]));
    }
    EXPECT_TRUE(torch::equal(model.module()->weight, own));
  });
}

}  // namespace
}  // namespace paceline::optim
