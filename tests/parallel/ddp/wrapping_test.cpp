#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "parallel/ddp/pair.h"
#include "support/cases.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::expect_torch_ranks;
using test::input_of;
using test::loss_of;
using test::make_net;
using test::make_pair;
using test::Net;
using test::NetImpl;
using test::Pair;
using test::PairImpl;
using test::RankContext;
using test::squared_norm;
using test::Triple;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;

using WrappingBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, WrappingBackends, ::testing::ValuesIn(backends()), test::CaseName());

// A backend of LibTorch would wait for threads that the child does not have.
TEST_P(WrappingBackends, AForkedChildCannotTrainTheModel) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    DistributedDataParallel model(make_net(at::kFloat));
    const auto train = [&] {
      const auto x = batch_of(rank, 0, at::kFloat);
      loss_of(model(x), x).backward();
    };
    if (rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(30);
        const auto is_refused = [](auto call) {
          try {
            call();
            return false;
          } catch (const UsageError& error) {
            return std::string(error.what()).find("in a forked child") != std::string::npos;
          }
        };
        const auto wrap = [] { const DistributedDataParallel other(make_net(at::kFloat)); };
        ::_exit(is_refused(wrap) && is_refused(train) ? 0 : 1);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
    }
    train();
  });
}

TEST_P(WrappingBackends, NamesTheFirstDifferenceOfModels) {
  const std::string& backend = GetParam();
  const auto construct = [&](auto make) {
    return test::run_torch_ranks(3, backend, [&](const RankContext& context) {
      const World world = init_process_group(context.init);
      const DistributedDataParallel model(make(context.rank));
      return std::string("no error");
    });
  };
  for (const auto& end :
       construct([](int rank) { return torch::nn::Linear(9, rank == 1 ? 5 : 4); })) {
    EXPECT_THAT(end.report,
                AllOf(HasSubstr("weight, a parameter of shape [4, 9] and type Float on rank 0"),
                      HasSubstr("weight, a parameter of shape [5, 9] and type Float on rank 1")));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Linear linear(9, 4);
         if (rank == 2) linear->to(at::kDouble);
         return linear;
       })) {
    EXPECT_THAT(end.report,
                HasSubstr("weight, a parameter of shape [4, 9] and type Double on rank 2"));
  }
  for (const auto& end : construct([](int rank) {
         return torch::nn::Linear(torch::nn::LinearOptions(9, 4).bias(rank != 1));
       })) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("2 parameters and buffers on rank 0, 1 on rank 1"),
                                  HasSubstr("nothing more on rank 1")));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Conv2d conv(3, 4, 2);
         if (rank == 1)
           conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
         return conv;
       })) {
    EXPECT_THAT(end.report, HasSubstr("type Float with strides [12, 1, 6, 3] on rank 1"));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Linear linear(9, 4);
         linear->bias.requires_grad_(rank != 2);
         return linear;
       })) {
    EXPECT_THAT(end.report, HasSubstr("bias, a frozen parameter of shape [4] and type Float on "
                                      "rank 2"));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::BatchNorm1d norm(4);
         if (rank == 1) norm->running_mean.resize_({2, 2});
         return norm;
       })) {
    EXPECT_THAT(end.report, HasSubstr("running_mean, a buffer of shape [2, 2]"));
  }
}

TEST_P(WrappingBackends, NamesOptionsThatDiffer) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    const auto average = rank == 0 ? Average::ranks : Average::sum;
    EXPECT_THAT([&] { DistributedDataParallel(Net{}, {.average = average}); },
                ThrowsMessage<Mismatch>(HasSubstr(
                    "average = Average::ranks on rank 0 and average = Average::sum on rank 1: it "
                    "must be the same on all ranks")));
  });
}

TEST(Wrapping, RejectsInvalidOptions) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THROW(DistributedDataParallel(Net{}, {.bucket_cap_mb = 0}), UsageError);
    EXPECT_THROW(DistributedDataParallel(torch::nn::Tanh()), UsageError);
    EXPECT_THROW(DistributedDataParallel(std::shared_ptr<NetImpl>()), UsageError);
    const DistributedDataParallel all_in_one(
        Net{}, {.bucket_cap_mb = std::numeric_limits<double>::infinity()});
  });
}

TEST(Wrapping, StandsWhereTheHolderStood) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    torch::nn::Sequential net(torch::nn::Linear(9, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel model(net);
    EXPECT_EQ(model->named_parameters().keys(), net->named_parameters().keys());
    EXPECT_EQ(model->named_buffers().keys(), net->named_buffers().keys());
    for (const auto& one : net->named_parameters()) {
      EXPECT_TRUE(model->named_parameters()[one.key()].is_same(one.value()));
    }
    EXPECT_TRUE(model->buffers()[0].is_same(net->buffers()[0]));

    model->forward(batch_of(rank, 0, at::kFloat)).sum().backward();
    const auto gradient = [&](std::size_t i) { return net->parameters()[i].grad(); };
    EXPECT_TRUE(gradient(3).eq(test::kBatch).all().item<bool>());
    model->zero_grad(false);
    EXPECT_TRUE(gradient(3).eq(0).all().item<bool>());
    model->zero_grad();
    for (std::size_t i = 0; i < 4; ++i) EXPECT_FALSE(gradient(i).defined());

    model->eval();
    EXPECT_FALSE(model->is_training());
    EXPECT_FALSE(net[1]->as<torch::nn::BatchNorm1d>()->is_training());
    model->train();
    EXPECT_TRUE(net->is_training());
  });
}

TEST(Wrapping, RejectsUnsupportedModels) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto net = make_net(at::kDouble);
    DistributedDataParallel model(net);
    EXPECT_THAT([&] { const DistributedDataParallel second(net); },
                ThrowsMessage<UsageError>(HasSubstr("first.weight is wrapped by another")));
    const auto x = batch_of(rank, 0, at::kDouble);
    EXPECT_THAT([&] { loss_of(model(x), x).backward({}, false, true); },
                ThrowsMessage<UsageError>(HasSubstr("create_graph")));
    net->register_module("late", torch::nn::Linear(1, 1));
    EXPECT_THAT(
        [&] {
          for (int i = 0; i < 8; ++i) model(x);
        },
        ThrowsMessage<UsageError>(HasSubstr("8 parameters and had 6")));
  });
}

TEST(Ddp, NamesALayerThatWasReplaced) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto net = make_net(at::kDouble);
    DistributedDataParallel model(net);
    net->replace_module("last", std::make_shared<torch::nn::LinearImpl>(1, 1));
    EXPECT_THAT(
        [&] { model(batch_of(rank, 0, at::kDouble)); },
        ThrowsMessage<UsageError>(HasSubstr("parameter last.weight is another tensor than when")));
  });
}

TEST(Ddp, RejectsUnsupportedUse) {
  expect_torch_ranks(2, "paceline", [](int rank, int /*size*/) {
    const auto product = [](PairImpl& self, const Tensor& x) { return x * self.v * self.w; };
    const auto computed = torch::randn({3}).requires_grad_() * 0.1;
    EXPECT_THAT([&] { DistributedDataParallel(Pair(computed, torch::randn({3}), product)); },
                ThrowsMessage<UsageError>(HasSubstr("parameter w was computed from")));

    DistributedDataParallel model(make_pair({10}, {10}, product));
    squared_norm(model(input_of(rank, 0, {10}))).backward();
    EXPECT_THAT([&] { model.register_comm_hook(comm_hooks::all_reduce()); },
                ThrowsMessage<UsageError>(HasSubstr("before the first backward")));

    torch::nn::BatchNorm1d untracked(torch::nn::BatchNorm1dOptions(3).track_running_stats(false));
    EXPECT_THAT([&] { convert_sync_batchnorm(*untracked); },
                ThrowsMessage<UsageError>(HasSubstr("has no running statistics")));

    Pair moved = make_pair({10}, {10}, product);
    DistributedDataParallel before(moved);
    moved->to(at::kFloat);
    EXPECT_THAT([&] { before(input_of(rank, 0, {10}, at::kFloat)); },
                ThrowsMessage<UsageError>(HasSubstr("parameter w has changed its type")));

    SyncBatchNorm norm(3);
    const auto x = torch::randn({4, 3}).requires_grad_();
    EXPECT_THAT([&] { torch::autograd::grad({squared_norm(norm(x))}, {x}, {}, true, true); },
                ThrowsMessage<UsageError>(HasSubstr("no second derivatives")));
  });
}

using LoadedAfterWrappingBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, LoadedAfterWrappingBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

// Which exchanges what parameters are made of.
TEST_P(LoadedAfterWrappingBackends, RanksTrainTheSameModel) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Triple net;
    DistributedDataParallel model(net);
    const Tensor x = torch::full({2}, rank + 1.0);
    model(x, true).sum().backward();
    std::stringstream file;
    torch::save(net, file);
    torch::load(net, file);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model(x, true).sum().backward();
      EXPECT_TRUE(net->w.grad().equal(torch::full({2}, 3.0)));
    }
    EXPECT_EQ(model.stats().steps, 3U);
  });
}

}  // namespace
}  // namespace paceline
