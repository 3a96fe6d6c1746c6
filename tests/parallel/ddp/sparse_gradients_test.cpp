#include <gtest/gtest.h>
#include <torch/torch.h>

#include <paceline/ddp.h>

#include "support/cases.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    torch::manual_seed(8);
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 3).sparse(true)));
    fc = register_module("fc", torch::nn::Linear(3, 2));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& words) { return fc(table(words)).pow(2).sum(); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Words);

using SparseGradientsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, SparseGradientsBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(SparseGradientsBackends, StaySparse) {
  for (const Average average : {Average::ranks, Average::samples}) {
    expect_torch_ranks(3, GetParam(), [&](int rank, int n) {
      DistributedDataParallel model(Words(), {.average = average});
      for (int step = 0; step < 2; ++step) {
        model.module()->zero_grad();
        Words plain;
        double total = 0;
        for (int r = 0; r < n; ++r) total += average == Average::ranks ? 1 : r + 1;
        for (int r = 0; r < n; ++r) {
          const double weight = average == Average::ranks ? 1 : r + 1;
          (plain(torch::tensor({r, r + step, 7})) * (weight / total)).backward();
        }
        if (average == Average::samples) model.set_samples(rank + 1);
        model(torch::tensor({rank, rank + step, 7})).backward();
        const auto got = model.module()->table->weight.grad();
        ASSERT_TRUE(got.is_sparse());
        EXPECT_LE(got._nnz(), 8) << "rows that nobody used";
        EXPECT_TRUE(torch::allclose(got.to_dense(), plain->table->weight.grad().to_dense()));
        EXPECT_TRUE(torch::allclose(model.module()->fc->weight.grad(), plain->fc->weight.grad()));
      }
    });
  }
}

TEST_P(SparseGradientsBackends, MayBeDelayed) {
  expect_torch_ranks(2, GetParam(), [](int rank, int n) {
    DistributedDataParallel model(Words(), {.delay_all_reduce_named_params = {"table.weight"},
                                            .param_to_hook_all_reduce = "fc.weight"});
    for (int step = 0; step < 2; ++step) {
      model.module()->zero_grad();
      Words plain;
      for (int r = 0; r < n; ++r) (plain(torch::tensor({r, 7})) / n).backward();
      model(torch::tensor({rank, 7})).backward();
      const auto got = model.module()->table->weight.grad().to_dense();
      EXPECT_TRUE(torch::allclose(got, plain->table->weight.grad().to_dense()));
    }
  });
}

}  // namespace
}  // namespace paceline
