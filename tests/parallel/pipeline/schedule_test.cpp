#include "parallel/pipeline/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace paceline::pipeline {
namespace {

// As the papers draw them: "F0 F1 B0 B1".
std::string text_of(PipelineSchedule schedule, int stage, int stages, std::int64_t microbatches) {
  std::string text;
  for (const Action& action : actions_of(schedule, stage, stages, microbatches)) {
    text += text.empty() ? "" : " ";
    text += action.kind == PipelineAction::Kind::forward ? "F" : "B";
    text += std::to_string(action.microbatch);
  }
  return text;
}

TEST(PipelineSchedule, GPipeRunsAllForwardsFirst) {
  for (int stage = 0; stage < 3; ++stage) {
    EXPECT_EQ(text_of(PipelineSchedule::gpipe, stage, 3, 3), "F0 F1 F2 B0 B1 B2");
  }
}

// Narayanan et al., "Efficient Large-Scale Language Model Training", figure 4.
TEST(PipelineSchedule, OneForwardOneBackwardFollowsThePaper) {
  const auto of = [](int stage) { return text_of(PipelineSchedule::one_f_one_b, stage, 4, 8); };
  EXPECT_EQ(of(0), "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7");
  EXPECT_EQ(of(1), "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7");
  EXPECT_EQ(of(2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7");
  EXPECT_EQ(of(3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7");
}

TEST(PipelineSchedule, FewMicrobatchesGiveGPipe) {
  EXPECT_EQ(text_of(PipelineSchedule::one_f_one_b, 0, 4, 2), "F0 F1 B0 B1");
  EXPECT_EQ(text_of(PipelineSchedule::one_f_one_b, 2, 4, 1), "F0 B0");
}

// Every micro-batch once, backwards in order and after their forwards, and no more activations kept
// than there are later stages.
TEST(PipelineSchedule, KeepsItsInvariants) {
  for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
    for (int stages = 1; stages <= 6; ++stages) {
      for (int stage = 0; stage < stages; ++stage) {
        for (std::int64_t m = 1; m <= 9; ++m) {
          std::int64_t forwards = 0;
          std::int64_t backwards = 0;
          std::int64_t most = 0;
          for (const Action& action : actions_of(schedule, stage, stages, m)) {
            if (action.kind == PipelineAction::Kind::forward) {
              EXPECT_EQ(action.microbatch, forwards++);
            } else {
              EXPECT_EQ(action.microbatch, backwards++);
            }
            EXPECT_LE(backwards, forwards);
            most = std::max(most, forwards - backwards);
          }
          EXPECT_EQ(forwards, m);
          EXPECT_EQ(backwards, m);
          const bool keeps_all = schedule == PipelineSchedule::gpipe;
          EXPECT_LE(most, keeps_all ? m : stages - stage);
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline::pipeline
