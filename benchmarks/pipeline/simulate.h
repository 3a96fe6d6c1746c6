#pragma once

#include <cstdint>
#include <vector>

namespace paceline::bench {

// Schedules on equal stages. A forward of a micro-batch takes one unit of time, and a backward two:
// one for the gradients of the inputs, for which the stage before waits, and one for those of the
// weights.
enum class IdealSchedule {
  model_parallel,  // the whole batch at once
  gpipe,
  one_f_one_b,
  zero_bubble  // ZB-H1: gradients of weights fill the gaps (Qi et al., "Zero Bubble", ICLR 2024)
};

struct IdealSpan {
  enum class Work { forward, backward, input_gradients, weight_gradients };
  Work work;
  std::int64_t microbatch;
  double begin;
  double end;
};

// By stage, in order.
using IdealStep = std::vector<std::vector<IdealSpan>>;

IdealStep simulate(IdealSchedule schedule, int stages, std::int64_t microbatches);

double end_of(const IdealStep& step);
// The part of all stages' time in which they do nothing.
double bubble_of(const IdealStep& step);

}  // namespace paceline::bench
