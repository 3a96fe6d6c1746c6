#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/lr_scheduler.h>

#include "optim/schedules.h"

namespace paceline::optim {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::optim::SGD;

SGD make_sgd(double lr = 0.1) {
  return SGD({torch::zeros({2}, at::requires_grad())}, lr);
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], 1e-12 * std::abs(expected[i]));
  }
}

TEST(LRScheduler, SetsTheRatesAndMomentaOfPython) {
  ASSERT_FALSE(expected_rates().empty());
  for (const ExpectedRates& expected : expected_rates()) {
    const auto optimizer = make_optimizer(expected.optimizer);
    const auto schedule = make_schedule(*optimizer, expected.schedule);
    for (std::size_t epoch = 0; epoch < expected.rates.size(); ++epoch) {
      SCOPED_TRACE(::testing::Message() << expected.schedule << ", epoch " << epoch);
      EXPECT_EQ(schedule->last_epoch(), static_cast<std::int64_t>(epoch));
      expect_near(rates_of(*optimizer), expected.rates[epoch]);
      expect_near(momenta_of(*optimizer), expected.momenta[epoch]);
      EXPECT_EQ(schedule->get_last_lr(), rates_of(*optimizer));
      schedule->step();
    }
  }
}

TEST(LRScheduler, GoesOnFromItsStateAfterAnyEpoch) {
  for (const auto& named : schedules()) {
    const std::string& name = named.first;
    const auto optimizer = make_optimizer("sgd");
    const auto schedule = make_schedule(*optimizer, name);
    for (int epoch = 0; epoch < 30; ++epoch) {
      SCOPED_TRACE(::testing::Message() << name << ", epoch " << epoch);
      const auto other_optimizer = make_optimizer("sgd");
      const auto other = make_schedule(*other_optimizer, name);
      other->load_state_dict(schedule->state_dict());
      // What the optimizer's own state restores.
      for (std::size_t i = 0; i < 2; ++i) {
        other_optimizer->param_groups()[i].set_options(std::make_unique<torch::optim::SGDOptions>(
            dynamic_cast<torch::optim::SGDOptions&>(optimizer->param_groups()[i].options())));
      }
      EXPECT_EQ(other->get_last_lr(), schedule->get_last_lr());
      EXPECT_EQ(other->last_epoch(), schedule->last_epoch());
      schedule->step();
      other->step();
      EXPECT_EQ(rates_of(*other_optimizer), rates_of(*optimizer));
      EXPECT_EQ(momenta_of(*other_optimizer), momenta_of(*optimizer));
    }
  }
}

TEST(LRScheduler, StateReplacesTheOptions) {
  SGD sgd = make_sgd();
  SGD other = make_sgd();
  StepLR schedule(sgd, {.step_size = 2, .gamma = 0.5});
  StepLR loaded(other, {.step_size = 7, .gamma = 0.25});
  loaded.load_state_dict(schedule.state_dict());
  loaded.step();
  loaded.step();
  EXPECT_THAT(loaded.get_last_lr(), ElementsAre(0.05));

  OneCycleLR cycle(sgd, {.max_lr = {1}, .total_steps = 20, .cycle_momentum = false});
  OneCycleLR loaded_cycle(other, {.max_lr = {9}, .total_steps = 5, .cycle_momentum = false});
  loaded_cycle.load_state_dict(cycle.state_dict());
  for (int i = 0; i < 19; ++i) {
    cycle.step();
    loaded_cycle.step();
    EXPECT_EQ(loaded_cycle.get_last_lr(), cycle.get_last_lr());
  }
}

TEST(LRScheduler, SeveralActOnOneOptimizer) {
  SGD sgd = make_sgd(1);
  StepLR halves(sgd, {.step_size = 1, .gamma = 0.5});
  MultiStepLR once(sgd, {.milestones = {2}, .gamma = 0.25});
  for (int i = 0; i < 2; ++i) {
    halves.step();
    once.step();
  }
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.0625);
}

at::IValue with(const at::IValue& state, const char* name, const at::IValue& value) {
  auto dict = state.toGenericDict().copy();
  dict.insert_or_assign(name, value);
  return dict;
}

TEST(LRScheduler, StateThatDoesNotFitIsRefusedAndChangesNothing) {
  SGD sgd = make_sgd();
  StepLR schedule(sgd, {.step_size = 2});
  schedule.step();
  const at::IValue own = schedule.state_dict();
  const auto refused = [&](LRScheduler& by, const at::IValue& state, const auto& why) {
    const auto before = by.state_dict();
    EXPECT_THAT([&] { by.load_state_dict(state); }, ThrowsMessage<Error>(why));
    EXPECT_EQ(by.state_dict().toGenericDict().at("_last_lr").toListRef()[0],
              before.toGenericDict().at("_last_lr").toListRef()[0]);
    EXPECT_EQ(by.last_epoch(), before.toGenericDict().at("last_epoch").toInt());
  };
  refused(schedule, {}, HasSubstr("StepLR: the state is a None and not a dict"));
  SGD other = make_sgd();
  CosineAnnealingLR cosine(other, {.T_max = 3});
  refused(schedule, cosine.state_dict(),
          AllOf(HasSubstr("no 'step_size'; it has: T_max, eta_min"),
                HasSubstr("Load what state_dict of a StepLR returned")));
  refused(schedule, with(own, "step_size", 0), HasSubstr("step_size is 0; it must be at least 1"));
  refused(schedule, with(own, "step_size", 2.5), HasSubstr("'step_size' has a Double, and must"));
  refused(schedule, with(own, "gamma", "x"), HasSubstr("'gamma' has a String, and must"));
  refused(schedule, with(own, "gamma", std::nan("")), HasSubstr("'gamma' has nan"));
  SGD third = make_sgd();
  LambdaLR lambda(third, {.lr_lambda = {[](std::int64_t) { return 1.0; }}});
  refused(lambda, own, HasSubstr("lr_lambdas"));
  const auto of_two = make_optimizer("sgd");
  StepLR two(*of_two, {.step_size = 2});
  refused(schedule, two.state_dict(), HasSubstr("'base_lrs' has 2 values, and the optimizer 1"));

  SequentialLR sequence(
      other, {.schedulers = {LinearLROptions{}, StepLROptions{.step_size = 3}}, .milestones = {5}});
  sequence.step();
  const at::IValue of_sequence = sequence.state_dict();
  auto parts = of_sequence.toGenericDict().at("_schedulers").toList().copy();
  parts.set(1, with(parts.get(1), "step_size", -1));
  refused(sequence, with(of_sequence, "_schedulers", parts), HasSubstr("step_size is -1"));
  refused(sequence, with(of_sequence, "_schedulers", c10::impl::GenericList(c10::AnyType::get())),
          HasSubstr("'_schedulers' must be a list of 2"));

  OneCycleLR cycle(other, {.max_lr = {1}, .total_steps = 9, .cycle_momentum = false});
  const at::IValue of_cycle = cycle.state_dict();
  refused(cycle, with(of_cycle, "total_steps", 0), HasSubstr("'total_steps' is 0"));
  refused(cycle, with(of_cycle, "_anneal_func_type", "sin"), HasSubstr("is 'sin'"));
  refused(cycle, with(with(of_cycle, "cycle_momentum", true), "use_beta1", false),
          HasSubstr("made without cycle_momentum"));
}

TEST(LRScheduler, TakesWholeNumbersAndTensorsOfAState) {
  SGD sgd = make_sgd();
  StepLR schedule(sgd, {.step_size = 2});
  auto state = with(with(schedule.state_dict(), "gamma", 1), "step_size", 3.0);
  c10::impl::GenericList rates(c10::AnyType::get());
  rates.push_back(torch::tensor(0.5, at::kDouble));
  schedule.load_state_dict(with(state, "_last_lr", rates));
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.5));
  EXPECT_EQ(schedule.state_dict().toGenericDict().at("step_size"), 3);
}

TEST(LRScheduler, RejectsInvalidOptions) {
  SGD sgd = make_sgd();
  const auto rejects = [&](const AnyOptions& options, const char* why) {
    EXPECT_THAT([&] { std::visit(MakeSchedule{sgd}, options); },
                ThrowsMessage<UsageError>(HasSubstr(why)));
    EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.1);
  };
  rejects(StepLROptions{}, "step_size is 0; it must be at least 1");
  rejects(StepLROptions{.step_size = 1, .gamma = INFINITY}, "gamma is inf");
  rejects(MultiStepLROptions{.milestones = {3, -1}}, "milestone is -1");
  rejects(ConstantLROptions{.factor = 0}, "factor is 0; it must be in (0, 1]");
  rejects(ConstantLROptions{.total_iters = -1}, "total_iters is -1");
  rejects(LinearLROptions{.start_factor = 0}, "start_factor is 0; it must be in (0, 1]");
  rejects(LinearLROptions{.end_factor = 1.5}, "end_factor is 1.5; it must be in [0, 1]");
  rejects(PolynomialLROptions{.power = -1}, "power is -1");
  rejects(CosineAnnealingLROptions{}, "T_max is 0; it must be at least 1");
  rejects(LambdaLROptions{}, "lr_lambda has 0 values");
  rejects(LambdaLROptions{{nullptr}}, "has an empty function");
  rejects(OneCycleLROptions{.max_lr = {1}}, "set total_steps, or both epochs");
  rejects(OneCycleLROptions{.max_lr = {1}, .total_steps = 0}, "total_steps is 0");
  rejects(
      OneCycleLROptions{
          .max_lr = {1}, .epochs = std::int64_t{1} << 40, .steps_per_epoch = std::int64_t{1} << 24},
      "1099511627776 epochs of 16777216 steps are too many");
  rejects(OneCycleLROptions{.total_steps = 9}, "max_lr has 0 values; give one, or one for each");
  rejects(OneCycleLROptions{.max_lr = {1}, .total_steps = 9, .pct_start = 1.5}, "pct_start is 1.5");
  rejects(OneCycleLROptions{.max_lr = {1}, .total_steps = 9, .anneal_strategy = "sin"}, "'sin'");
  rejects(OneCycleLROptions{.max_lr = {1}, .total_steps = 9, .div_factor = 0}, "div_factor is 0");
  rejects(SequentialLROptions{}, "schedulers is empty");
  rejects(SequentialLROptions{.schedulers = {LinearLROptions{}}, .milestones = {1}},
          "1 milestones for 1 schedulers");
  rejects(
      SequentialLROptions{.schedulers = {LinearLROptions{}, LinearLROptions{}, LinearLROptions{}},
                          .milestones = {5, 3}},
      "milestones must ascend");
  torch::optim::Adagrad adagrad({torch::zeros({2}, at::requires_grad())});
  EXPECT_THAT([&] { OneCycleLR(adagrad, {.max_lr = {1}, .total_steps = 9}); },
              ThrowsMessage<UsageError>(HasSubstr("set cycle_momentum = false")));
}

TEST(OneCycleLR, EndsAfterItsStepsAndChangesNothing) {
  SGD sgd = make_sgd();
  OneCycleLR schedule(sgd, {.max_lr = {1}, .total_steps = 3});
  for (int i = 0; i < 3; ++i) schedule.step();
  const double last = sgd.param_groups()[0].options().get_lr();
  EXPECT_THAT([&] { schedule.step(); }, ThrowsMessage<UsageError>(HasSubstr("step 4 of 3")));
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), last);
  EXPECT_EQ(schedule.last_epoch(), 3);
}

// Python divides by zero.
TEST(OneCycleLR, MayRiseInOneStep) {
  SGD sgd = make_sgd();
  const OneCycleLR schedule(sgd, {.max_lr = {1}, .total_steps = 10, .pct_start = 0.1});
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(1));
}

TEST(LRScheduler, RejectsGroupsThatCameLater) {
  SGD sgd = make_sgd();
  StepLR schedule(sgd, {.step_size = 1});
  sgd.add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({1}, at::requires_grad())}));
  EXPECT_THAT([&] { schedule.step(); },
              ThrowsMessage<UsageError>(HasSubstr("has 2 groups, and had 1")));
  EXPECT_EQ(schedule.last_epoch(), 0);
}

TEST(LRScheduler, AFunctionThatThrowsChangesNothing) {
  SGD sgd = make_sgd();
  LambdaLR schedule(sgd, {{[](std::int64_t epoch) {
                      if (epoch == 1) throw std::runtime_error("no");
                      return 1.0;
                    }}});
  EXPECT_THROW(schedule.step(), std::runtime_error);
  EXPECT_EQ(schedule.last_epoch(), 0);
}

TEST(LRScheduler, CanBeMoved) {
  SGD sgd = make_sgd();
  StepLR schedule(sgd, {.step_size = 1});
  StepLR moved = std::move(schedule);
  moved.step();
  EXPECT_EQ(moved.last_epoch(), 1);
}

}  // namespace
}  // namespace paceline::optim
