#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/error.h>

#include "support/temporary_directory.h"

namespace paceline {
namespace {

using namespace torch::optim;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(const torch::nn::Linear&)>;

template <typename O, typename Options>
std::pair<std::string, MakeOptimizer> make(const std::string& name, const Options& options) {
  return {name, [options](const torch::nn::Linear& net) -> std::unique_ptr<Optimizer> {
            return std::make_unique<O>(net->parameters(), options);
          }};
}

const std::vector<std::pair<std::string, MakeOptimizer>> kOptimizers{
    make<SGD>("SGD", SGDOptions(0.01)),
    make<SGD>("SGD with momentum", SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.1)),
    make<Adam>("Adam", AdamOptions(0.01).betas({0.8, 0.99})),
    make<Adam>("AMSGrad", AdamOptions(0.01).amsgrad(true)),
    make<AdamW>("AdamW", AdamWOptions(0.01).weight_decay(0.2)),
    make<RMSprop>("RMSprop", RMSpropOptions(0.01).momentum(0.5).centered(true)),
    make<Adagrad>("Adagrad", AdagradOptions(0.01).lr_decay(0.1)),
    make<LBFGS>("LBFGS", LBFGSOptions(0.5).max_iter(3).history_size(4)),
    make<LBFGS>("LBFGS with line search",
                LBFGSOptions(1).max_iter(3).max_eval(9).line_search_fn("strong_wolfe")),
};

torch::nn::Linear make_net() {
  torch::manual_seed(1);
  return torch::nn::Linear(3, 2);
}

void train(torch::nn::Linear net, Optimizer& optimizer, int steps) {
  const auto x = torch::arange(12.0).reshape({4, 3}) / 7;
  for (int step = 0; step < steps; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = (net(x).sin() - step).square().sum();
      loss.backward();
      return loss;
    });
  }
}

// Through a file, into an optimizer with other options.
TEST(OptimizerState, TrainingGoesOnWithTheSameBits) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "state.pt";
  for (const auto& [name, make_optimizer] : kOptimizers) {
    const auto net = make_net();
    const auto optimizer = make_optimizer(net);
    train(net, *optimizer, 3);
    auto other = make_net();
    load_state_dict(*other, state_dict(*net));
    const auto fresh = make_optimizer(other);
    fresh->param_groups()[0].options().set_lr(17);
    pickle_save(state_dict(*optimizer), path);
    load_state_dict(*fresh, pickle_load(path));
    train(net, *optimizer, 3);
    train(other, *fresh, 3);
    EXPECT_TRUE(torch::equal(other->weight, net->weight)) << name;
    EXPECT_TRUE(torch::equal(other->bias, net->bias)) << name;
    EXPECT_EQ(fresh->param_groups()[0].options().get_lr(),
              optimizer->param_groups()[0].options().get_lr());
  }
}

TEST(OptimizerState, HasEachGroupsOptions) {
  const auto net = make_net();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{net->weight}, std::make_unique<SGDOptions>(0.5));
  groups.emplace_back(std::vector{net->bias}, std::make_unique<SGDOptions>(0.25));
  SGD sgd(groups, SGDOptions(1));
  const at::IValue all = state_dict(sgd).toGenericDict().at("param_groups");
  const auto state = all.toListRef();
  ASSERT_EQ(state.size(), 2U);
  EXPECT_EQ(state[0].toGenericDict().at("lr"), 0.5);
  EXPECT_EQ(state[1].toGenericDict().at("lr"), 0.25);
  EXPECT_EQ(state[1].toGenericDict().at("params").toListRef()[0], 1);
}

// files/make_pt trains a net whose parameters have these shapes.
TEST(OptimizerState, OfPythonIsTaken) {
  std::vector<at::Tensor> parameters;
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{2, 3}, {2}, {2}, {2}, {1, 2}}) {
    parameters.push_back(torch::zeros(sizes, at::requires_grad()));
  }
  AdamW adam(parameters);
  const auto training = pickle_load(FILES_DIRECTORY "/training.pt").toGenericDict();
  load_state_dict(adam, training.at("optimizer"));
  const auto& options = dynamic_cast<AdamWOptions&>(adam.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.0625);
  EXPECT_EQ(options.betas(), std::make_tuple(0.9, 0.999));
  const auto& state =
      dynamic_cast<AdamWParamState&>(*adam.state().at(parameters[4].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 2);
  EXPECT_FALSE(state.max_exp_avg_sq().defined());
  EXPECT_TRUE(torch::equal(state.exp_avg(), training.at("optimizer")
                                                .toGenericDict()
                                                .at("state")
                                                .toGenericDict()
                                                .at(4)
                                                .toGenericDict()
                                                .at("exp_avg")
                                                .toTensor()));
}

// As it is of a program that gave a list.
TEST(OptimizerState, WithBetasInAListIsTaken) {
  const auto net = make_net();
  Adam adam(net->parameters(), AdamOptions(0.5));
  const auto state = state_dict(adam).toGenericDict();
  const auto group = state.at("param_groups").toListRef()[0].toGenericDict();
  c10::List<double> betas{0.25, 0.75};
  group.insert_or_assign("betas", betas);
  load_state_dict(adam, state);
  EXPECT_EQ(dynamic_cast<AdamOptions&>(adam.param_groups()[0].options()).betas(),
            std::make_tuple(0.25, 0.75));
}

// After its first inner iteration, Python's LBFGS has a number for H_diag, and no al.
TEST(OptimizerState, OfPythonsLbfgsIsTaken) {
  const auto make = [] {
    auto parameter = torch::ones({2}, at::requires_grad());
    return std::pair(parameter, std::make_unique<LBFGS>(std::vector{parameter}));
  };
  const auto train = [](const at::Tensor& parameter, LBFGS& lbfgs) {
    lbfgs.step([&] {
      lbfgs.zero_grad();
      auto loss = (parameter - 3).pow(2).sum();
      loss.backward();
      return loss;
    });
  };
  const auto [trained, first] = make();
  dynamic_cast<LBFGSOptions&>(first->param_groups()[0].options()).max_iter(1);
  train(trained, *first);
  const at::IValue saved = paceline::state_dict(*first);
  load_state_dict(*make().second, saved);
  const auto state = saved.toGenericDict().at("state").toGenericDict().at(0).toGenericDict();
  state.insert_or_assign("H_diag", 1);
  EXPECT_EQ(state.erase("al"), 1);
  const auto [again, second] = make();
  torch::NoGradGuard no_grad;
  again.copy_(trained);
  load_state_dict(*second, saved);
  const torch::AutoGradMode with_grad(true);
  for (const auto& [parameter, lbfgs] : {std::tie(trained, first), std::tie(again, second)}) {
    train(parameter, *lbfgs);
  }
  EXPECT_TRUE(torch::equal(again, trained));
}

TEST(OptimizerState, OfLbfgsHasTheTypeAndTheSizeOfTheParameters) {
  const auto make = [](const at::TensorOptions& options, std::vector<std::int64_t> sizes) {
    std::vector<at::Tensor> parameters;
    for (const auto size : sizes) {
      parameters.push_back(torch::ones({size}, options.requires_grad(true)));
    }
    return LBFGS(parameters, LBFGSOptions(1).max_iter(3));
  };
  LBFGS trained = make(at::kDouble, {2, 1});
  trained.step([&] {
    trained.zero_grad();
    at::Tensor loss = torch::zeros({}, at::kDouble);
    for (const at::Tensor& one : trained.param_groups()[0].params()) {
      loss = loss + (one - 3).pow(4).sum();
    }
    loss.backward();
    return loss;
  });
  const at::IValue saved = paceline::state_dict(trained);
  LBFGS small = make(at::kFloat, {1, 2});
  load_state_dict(small, saved);
  const at::Tensor& first = small.param_groups()[0].params()[0];
  const auto& state =
      dynamic_cast<LBFGSParamState&>(*small.state().at(first.unsafeGetTensorImpl()));
  ASSERT_FALSE(state.old_dirs().empty());
  for (const at::Tensor& one : {state.d(), state.H_diag(), state.old_dirs()[0], state.ro()[0]}) {
    EXPECT_EQ(one.scalar_type(), at::kFloat);
  }
  LBFGS large = make(at::kDouble, {2, 2});
  EXPECT_THAT([&] { load_state_dict(large, saved); },
              ThrowsMessage<Error>(HasSubstr("of shape [3], and its parameters need [4]")));
}

// As Python matches them.
TEST(OptimizerState, IsMatchedByTheOrderOfTheParameters) {
  const auto net = make_net();
  SGD sgd(net->parameters(), SGDOptions(1).momentum(0.5));
  train(net, sgd, 1);
  const auto momentum_of = [&](const at::Tensor& parameter) {
    return dynamic_cast<SGDParamState&>(*sgd.state().at(parameter.unsafeGetTensorImpl()))
        .momentum_buffer();
  };
  const at::Tensor expected = momentum_of(net->bias).clone();
  const at::IValue state = state_dict(sgd);
  const auto states = state.toGenericDict().at("state").toGenericDict();
  const auto group = state.toGenericDict().at("param_groups").toListRef()[0].toGenericDict();
  for (const std::vector<at::IValue>& ids :
       {std::vector<at::IValue>{7, 5}, {"linear.weight", "linear.bias"}}) {
    auto renamed = c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
    c10::impl::GenericList params(c10::AnyType::get());
    for (std::size_t i = 0; i < 2; ++i) {
      renamed.insert(ids[i], states.at(static_cast<std::int64_t>(i)));
      params.push_back(ids[i]);
    }
    state.toGenericDict().insert_or_assign("state", renamed);
    group.insert_or_assign("params", params);
    sgd.state().clear();
    load_state_dict(sgd, state);
    EXPECT_TRUE(torch::equal(momentum_of(net->bias), expected));
  }
}

TEST(OptimizerState, OfOptionsThatLibTorchDoesNotHaveIsRefused) {
  const auto net = make_net();
  const auto with = [](auto& optimizer, const char* name, bool value) {
    const at::IValue state = state_dict(optimizer);
    state.toGenericDict().at("param_groups").toListRef()[0].toGenericDict().insert(name, value);
    return state;
  };
  const auto refuses = [&](auto& optimizer, const char* name, bool value, const char* why) {
    EXPECT_THAT([&] { load_state_dict(optimizer, with(optimizer, name, value)); },
                ThrowsMessage<Error>(HasSubstr(why)));
    load_state_dict(optimizer, with(optimizer, name, !value));
  };
  SGD sgd(net->parameters(), SGDOptions(1));
  Adam adam(net->parameters());
  AdamW adamw(net->parameters());
  refuses(sgd, "maximize", true, "group 0 has maximize = True");
  refuses(adamw, "maximize", true, "group 0 has maximize = True");
  refuses(adam, "decoupled_weight_decay", true, "has decoupled_weight_decay = True");
  refuses(adamw, "decoupled_weight_decay", false, "has decoupled_weight_decay = False");
}

TEST(OptimizerState, ThatDoesNotFitIsRefusedAndChangesNothing) {
  const auto net = make_net();
  Adam adam(net->parameters());
  train(net, adam, 2);
  const auto refused = [&](const at::IValue& state, const char* why) {
    EXPECT_THAT([&] { load_state_dict(adam, state); }, ThrowsMessage<Error>(HasSubstr(why)));
    EXPECT_EQ(adam.state().size(), 2U);
  };
  refused({}, "it has no 'state'");
  torch::nn::Linear wide(4, 2);
  Adam of_wide(wide->parameters());
  wide(torch::ones({1, 4})).sum().backward();
  of_wide.step();
  refused(state_dict(of_wide),
          "parameter 0 has a tensor of shape [2, 4], and its parameters need [2, 3]");
  Adam of_one({wide->weight});
  refused(state_dict(of_one), "group 0 has 1 parameters, and that of the optimizer 2");
  SGD sgd(net->parameters(), SGDOptions(1).momentum(0.5));
  refused(state_dict(sgd), "group 0 has no 'betas'");
  const at::IValue text = state_dict(adam);
  text.toGenericDict().at("state").toGenericDict().at(1).toGenericDict().insert_or_assign("exp_avg",
                                                                                          "none");
  refused(text, "'exp_avg' of the state of parameter 1 is a String");
  const at::IValue none = state_dict(adam);
  std::ignore =
      none.toGenericDict().at("state").toGenericDict().at(1).toGenericDict().erase("exp_avg");
  refused(none, "the state of parameter 1 has no 'exp_avg'");
  const at::IValue integers = state_dict(adam);
  integers.toGenericDict().at("state").toGenericDict().at(1).toGenericDict().insert_or_assign(
      "exp_avg", torch::ones({2}, at::kInt));
  refused(integers, "has a tensor of Int, and not a dense one of float");
  const at::IValue more = state_dict(adam);
  more.toGenericDict().at("state").toGenericDict().insert(
      2, c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()));
  refused(more, "there are 3 states, and 2 of them are of parameters in 'params'");
  std::vector<OptimizerParamGroup> groups{OptimizerParamGroup({net->weight}),
                                          OptimizerParamGroup({net->bias})};
  Adam of_two(groups);
  refused(state_dict(of_two), "has 2 parameter groups, and the optimizer 1");
}

struct OwnOptions : OptimizerCloneableOptions<OwnOptions> {};
struct OwnOptimizer : Optimizer {
  using Optimizer::Optimizer;
  at::Tensor step(LossClosure /*closure*/) override { return {}; }
};

TEST(OptimizerState, OfAnotherOptimizerIsRefused) {
  const OwnOptimizer own(make_net()->parameters(), std::make_unique<OwnOptions>());
  EXPECT_THAT([&] { std::ignore = state_dict(own); },
              ThrowsMessage<UsageError>(HasSubstr("not one of LibTorch's or Paceline's: SGD")));
}

}  // namespace
}  // namespace paceline
