#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include <paceline/checkpoint_directory.h>
#include <paceline/data_parallel.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/exponential_moving_average.h>
#include <paceline/hogwild.h>
#include <paceline/parameter_server.h>
#include <paceline/pipeline.h>
#include <paceline/sync_batch_norm.h>

namespace paceline {
namespace {

TEST(NullModules, AreRefusedInTheNameOfWhatWasGivenOne) {
  const torch::nn::Linear none = nullptr;
  const std::shared_ptr<torch::nn::LinearImpl> nothing;
  const auto is_refused = [](const std::string& user) {
    return ::testing::ThrowsMessage<UsageError>(user + ": the module is null; make it first");
  };
  const auto loss = [](const at::Tensor& output, const at::Tensor& /*target*/) {
    return output.sum();
  };
  const auto make_optimizer = [](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::SGD>(parameters, 0.1);
  };
  EXPECT_THAT([&] { DistributedDataParallel{none}; }, is_refused("DistributedDataParallel"));
  EXPECT_THAT([&] { DistributedDataParallel{nothing}; }, is_refused("DistributedDataParallel"));
  EXPECT_THAT([&] { DataParallel{none}; }, is_refused("DataParallel"));
  EXPECT_THAT([&] { DataParallel{nothing}; }, is_refused("DataParallel"));
  EXPECT_THAT([&] { Pipeline(none, loss); }, is_refused("Pipeline"));
  EXPECT_THAT([&] { Pipeline(nothing, loss); }, is_refused("Pipeline"));
  EXPECT_THAT([&] { convert_sync_batchnorm(none); }, is_refused("convert_sync_batchnorm"));
  EXPECT_THAT([&] { convert_sync_batchnorm(nothing); }, is_refused("convert_sync_batchnorm"));
  EXPECT_THAT([&] { ParameterServer(none, make_optimizer); }, is_refused("ParameterServer"));
  EXPECT_THAT([&] { share_memory(none); }, is_refused("share_memory"));
  EXPECT_THAT([&] { optim::ExponentialMovingAverage{none}; },
              is_refused("ExponentialMovingAverage"));
  EXPECT_THAT([&] { Stateful{none}; }, is_refused("Stateful"));
}

}  // namespace
}  // namespace paceline
