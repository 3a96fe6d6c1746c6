#include "benchmarks/pipeline/simulate.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

namespace paceline::bench {
namespace {

using Work = IdealSpan::Work;

// The formulas of the papers, in thirds of a micro-batch's forward and backward.
TEST(SimulatedPipeline, HasTheBubblesOfThePapers) {
  for (int p = 1; p <= 6; ++p) {
    for (std::int64_t m = p; m <= 12; ++m) {
      const auto bubble = [&](IdealSchedule schedule) {
        return bubble_of(simulate(schedule, p, m));
      };
      const double stages = p;
      const auto microbatches = static_cast<double>(m);
      EXPECT_NEAR(bubble(IdealSchedule::model_parallel), (stages - 1) / stages, 1e-12);
      EXPECT_NEAR(bubble(IdealSchedule::gpipe), (stages - 1) / (microbatches + stages - 1), 1e-12);
      EXPECT_NEAR(bubble(IdealSchedule::one_f_one_b), (stages - 1) / (microbatches + stages - 1),
                  1e-12);
      EXPECT_NEAR(bubble(IdealSchedule::zero_bubble),
                  (stages - 1) / (3 * microbatches + stages - 1), 1e-12);
      EXPECT_EQ(end_of(simulate(IdealSchedule::model_parallel, p, m)), 3 * microbatches * stages);
    }
  }
}

// Nothing begins before its tensors are there, and a stage does one thing at a time.
TEST(SimulatedPipeline, WaitsForTensors) {
  for (const auto schedule :
       {IdealSchedule::gpipe, IdealSchedule::one_f_one_b, IdealSchedule::zero_bubble}) {
    const auto step = simulate(schedule, 4, 8);
    std::map<std::pair<std::size_t, std::int64_t>, double> forwards;
    std::map<std::pair<std::size_t, std::int64_t>, double> gradients;
    for (std::size_t stage = 0; stage < step.size(); ++stage) {
      double before = 0;
      for (const IdealSpan& span : step[stage]) {
        EXPECT_GE(span.begin, before);
        before = span.end;
        if (span.work == Work::forward) forwards[{stage, span.microbatch}] = span.end;
        if (span.work == Work::backward || span.work == Work::input_gradients) {
          gradients[{stage, span.microbatch}] = span.end;
        }
      }
    }
    EXPECT_EQ(forwards.size(), 32u);
    EXPECT_EQ(gradients.size(), 32u);
    for (std::size_t stage = 0; stage < step.size(); ++stage) {
      for (const IdealSpan& span : step[stage]) {
        if (span.work == Work::forward && stage > 0) {
          EXPECT_GE(span.begin, forwards.at({stage - 1, span.microbatch}));
        } else if (span.work == Work::weight_gradients) {
          EXPECT_GE(span.begin, gradients.at({stage, span.microbatch}));
        } else if (span.work != Work::forward) {
          EXPECT_GE(span.begin, stage + 1 < step.size() ? gradients.at({stage + 1, span.microbatch})
                                                        : forwards.at({stage, span.microbatch}));
        }
      }
    }
  }
}

}  // namespace
}  // namespace paceline::bench
