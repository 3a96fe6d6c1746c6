#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include <paceline/ddp.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

// Graphs in which parameters are shared, unused, or reached by backwards inside of others.
namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::RankContext;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// What a module may return.
struct Outputs {
  torch::Tensor logits;
  std::map<std::string, torch::Tensor> more;
};
template <typename Visit>
void for_each_tensor(const Outputs& outputs, Visit&& visit) {
  visit(outputs.logits);
  for (const auto& [name, tensor] : outputs.more) visit(tensor);
}

// A function whose backward runs a backward of its own, as activation checkpointing does.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               torch::nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = c10::IValue(reinterpret_cast<std::int64_t>(layer.ptr().get()));
    const torch::NoGradGuard no_grad;
    return torch::tanh(layer(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& outputs) {
    auto* const layer =
        reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    {
      const torch::AutoGradMode grad(true);
      torch::tanh(layer->forward(x)).backward(outputs[0]);
    }
    return {x.grad(), {}};
  }
};

struct CheckpointedImpl : torch::nn::Module {
  explicit CheckpointedImpl(bool checkpoint) : checkpoint_(checkpoint) {
    torch::manual_seed(4);
    first = register_module("first", torch::nn::Linear(9, 9));
    twice = register_module("twice", torch::nn::Linear(9, 9));
    unused = register_module("unused", torch::nn::Linear(2, 2));
    to(torch::kDouble);
  }
  Outputs forward(const torch::Tensor& x) {
    const auto apply = [&](const torch::Tensor& t) {
      return checkpoint_ ? Checkpoint::apply(t, twice) : torch::tanh(twice(t));
    };
    const auto y = apply(apply(first(x)));
    return {y.sum(1), {{"mean", y.mean()}}};
  }
  bool checkpoint_;
  torch::nn::Linear first{nullptr}, twice{nullptr}, unused{nullptr};
};
TORCH_MODULE(Checkpointed);

using DdpStaticGraphWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpStaticGraphWorldsUpTo3, test::worlds({2, 3}), test::CaseName());

TEST_P(DdpStaticGraphWorldsUpTo3, SupportsNestedBackwardsSharedAndUnusedParameters) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(Checkpointed(true),
                                  {.bucket_cap_mb = 0.0001, .static_graph = true});
    for (int step = 0; step < 4; ++step) {
      model.module()->zero_grad(step != 2);
      Checkpointed plain(false);
      for (int r = 0; r < n; ++r) {
        const auto x = batch_of(r, step, at::kDouble);
        const auto out = plain(x);
        ((out.logits.pow(2).sum() + out.more.at("mean")) / n).backward();
      }
      const auto x = batch_of(rank, step, at::kDouble);
      const auto out = model(x);
      (out.logits.pow(2).sum() + out.more.at("mean")).backward();
      for (const char* const name : {"first.weight", "twice.weight", "twice.bias"}) {
        EXPECT_TRUE(torch::allclose(model.module()->named_parameters()[name].grad(),
                                    plain->named_parameters()[name].grad(), 1e-10, 1e-12))
            << name << " in step " << step;
      }
      EXPECT_FALSE(model.module()->unused->weight.grad().defined());
    }
  });
}

using SkippedBucketsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, SkippedBucketsBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(SkippedBucketsBackends, AreThoseOfUnusedParameters) {
  expect_torch_ranks(3, GetParam(), [](int rank, int n) {
    DistributedDataParallel model(Checkpointed(false), {.bucket_cap_mb = 0.0001,
                                                        .find_unused_parameters = true,
                                                        .skip_all_reduce_unused_params = true});
    model.module()->unused->bias.mutable_grad() = torch::full({2}, double(rank), at::kDouble);
    for (int step = 0; step < 3; ++step) {
      for (auto part : {model.module()->first, model.module()->twice}) part->zero_grad();
      Checkpointed plain(false);
      for (int r = 0; r < n; ++r) {
        (plain(batch_of(r, step, at::kDouble)).logits.pow(2).sum() / n).backward();
      }
      model(batch_of(rank, step, at::kDouble)).logits.pow(2).sum().backward();
      EXPECT_TRUE(torch::allclose(model.module()->first->weight.grad(), plain->first->weight.grad(),
                                  1e-10, 1e-12));
      EXPECT_FALSE(model.module()->unused->weight.grad().defined());
      EXPECT_EQ(model.module()->unused->bias.grad()[0].item<double>(), rank);
    }
  });
}

struct SometimesImpl : torch::nn::Module {
  torch::nn::Linear always{register_module("always", torch::nn::Linear(1, 1))};
  torch::nn::Linear sometimes{register_module("sometimes", torch::nn::Linear(1, 1))};
  torch::Tensor forward(const torch::Tensor& x, bool both) {
    return both ? always(x) + sometimes(x) : always(x);
  }
};
TORCH_MODULE(Sometimes);

TEST_P(SkippedBucketsBackends, AreNotThoseUsedUnderNoSync) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    DistributedDataParallel model(Sometimes(), {.bucket_cap_mb = 0.000001,
                                                .find_unused_parameters = true,
                                                .skip_all_reduce_unused_params = true});
    const auto x = torch::full({1, 1}, double(rank));
    for (int step = 0; step < 3; ++step) {
      model.module()->zero_grad();
      {
        const auto guard = model.no_sync();
        model(x, true).sum().backward();
      }
      model(x, false).sum().backward();
      EXPECT_EQ(model.module()->sometimes->weight.grad().item<double>(), 0.5);
      EXPECT_EQ(model.module()->always->weight.grad().item<double>(), 1);
    }
  });
}

struct Opaque {
  torch::Tensor hidden;
};
struct OpaqueNetImpl : torch::nn::Module {
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(2, 2))};
  Opaque forward(const torch::Tensor& x) { return {fc(x)}; }
};
TORCH_MODULE(OpaqueNet);

TEST(DdpStaticGraph, RejectsAForwardWhoseTensorsItCannotFind) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel any{OpaqueNet()};
    any(torch::ones({1, 2})).hidden.sum().backward();
    DistributedDataParallel model(OpaqueNet(), {.static_graph = true});
    EXPECT_THAT(
        [&] {
          model(torch::ones({1, 2}));
        },
        ThrowsMessage<UsageError>(HasSubstr("for_each_tensor")));
  });
}

TEST(DdpStaticGraph, AGraphThatChangesIsAnError) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_net(at::kDouble), {.static_graph = true});
    const auto x = batch_of(context.rank, 0, at::kDouble);
    loss_of(model(x), x).backward();
    const auto y = model(x);
    (context.rank == 0 ? loss_of(y, x) : model.module()->first(x).sum()).backward();
    return std::string("no error");
  });
  for (const auto& end : ends) EXPECT_THAT(end.report, HasSubstr("static")) << end.report;
}

}  // namespace
}  // namespace paceline
