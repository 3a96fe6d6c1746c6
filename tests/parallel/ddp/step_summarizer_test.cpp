#include "parallel/ddp/step_summarizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace paceline::ddp {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<NamedTensor> two_parameters() {
  return {{"a", torch::zeros({3}, torch::requires_grad())},
          {"b", torch::zeros({2}, torch::requires_grad())}};
}

TEST(StepSummarizer, CountsForwardsAndLocalBackwards) {
  const auto parameters = two_parameters();
  StepSummarizer summarizer(parameters, {}, {});
  summarizer.count_forward(0);
  summarizer.count_forward(0);
  summarizer.count_local_backward(0);
  summarizer.note_backward(0);
  summarizer.count_forward(0);  // of the next step
  const auto summary = summarizer.summarize(false);
  EXPECT_EQ(summary.forwards, 2U);
  EXPECT_EQ(summary.local_backwards, 1U);
  EXPECT_EQ(summary.joined, 0U);
  EXPECT_EQ(summarizer.summarize(true).joined, 1U);
  summarizer.forget_local_backwards();
  summarizer.note_backward(0);
  EXPECT_EQ(summarizer.summarize(false).local_backwards, 0U);
  EXPECT_EQ(summarizer.summarize(false).forwards, 3U);
}

TEST(StepSummarizer, LeavesLocalBackwardsOutWhereRanksMayDifferInThem) {
  const auto parameters = two_parameters();
  StepSummarizer summarizer(parameters, {}, {.average = Average::samples});
  summarizer.count_local_backward(0);
  summarizer.note_backward(0);
  EXPECT_EQ(summarizer.summarize(false).local_backwards, 0U);
}

TEST(StepSummarizer, TellsWhichParametersAreFrozen) {
  const auto parameters = two_parameters();
  StepSummarizer summarizer(parameters, {}, {});
  EXPECT_EQ(summarizer.summarize(false).frozen, 0U);
  parameters[1].tensor.set_requires_grad(false);
  const auto second = summarizer.summarize(false).frozen;
  EXPECT_THAT(summarizer.frozen_flags(), ::testing::ElementsAre(0, 1));
  parameters[0].tensor.set_requires_grad(false);
  parameters[1].tensor.set_requires_grad(true);
  const auto first = summarizer.summarize(false).frozen;
  EXPECT_NE(first, 0U);
  EXPECT_NE(second, 0U);
  EXPECT_NE(first, second);
}

TEST(StepSummarizer, CountsChangesOfAllParametersSinceTheRanksHadTheSame) {
  const auto parameters = two_parameters();
  const at::Tensor frozen = torch::zeros({2});
  StepSummarizer summarizer(parameters, {{"c", frozen}}, {});
  EXPECT_EQ(summarizer.summarize(false).modifications, 0U);
  const torch::NoGradGuard no_grad;
  parameters[0].tensor.add_(1);
  frozen.add_(1);
  EXPECT_EQ(summarizer.summarize(false).modifications, 2U);
  const auto before = summarizer.summarize(false).modifications;
  at::Tensor(parameters[1].tensor).set_data(torch::ones({2}));
  EXPECT_GT(summarizer.summarize(false).modifications, before);
  summarizer.note_same_parameters();
  EXPECT_EQ(summarizer.summarize(false).modifications, 0U);
}

TEST(StepSummarizer, RefusesAParameterThatIsNoLongerFrozen) {
  const auto parameters = two_parameters();
  at::Tensor frozen = torch::zeros({2});
  const StepSummarizer summarizer(parameters, {{"c", frozen}}, {});
  summarizer.check_frozen();
  frozen.set_requires_grad(true);
  EXPECT_THAT([&] { summarizer.check_frozen(); },
              ThrowsMessage<UsageError>(HasSubstr("parameter c requires a gradient now")));
}

}  // namespace
}  // namespace paceline::ddp
