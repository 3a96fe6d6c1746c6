#include "simulate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "parallel/pipeline/schedule.h"

namespace paceline::bench {
namespace {

using Work = IdealSpan::Work;

struct Task {
  Work work;
  std::int64_t microbatch;
};
using Order = std::vector<Task>;  // of one stage

constexpr double kNever = std::numeric_limits<double>::infinity();

double time_of(Work work) {
  return work == Work::backward ? 2 : 1;
}

Order as_pipelines_run(PipelineSchedule schedule, int stage, int stages,
                       std::int64_t microbatches) {
  Order order;
  for (const auto& [kind, microbatch] :
       pipeline::actions_of(schedule, stage, stages, microbatches)) {
    const bool is_forward = kind == PipelineAction::Kind::forward;
    order.push_back({is_forward ? Work::forward : Work::backward, microbatch});
  }
  return order;
}

// As 1F1B, but stage s computes gradients of weights s micro-batches later than gradients of
// inputs, so that each stage keeps the activations of as many micro-batches as there are stages.
Order zero_bubble(int stage, int stages, std::int64_t microbatches) {
  Order order;
  std::int64_t weights = 0;
  for (const auto& [kind, microbatch] :
       pipeline::actions_of(PipelineSchedule::one_f_one_b, stage, stages, microbatches)) {
    const bool is_forward = kind == PipelineAction::Kind::forward;
    order.push_back({is_forward ? Work::forward : Work::input_gradients, microbatch});
    if (!is_forward && microbatch >= stage) order.push_back({Work::weight_gradients, weights++});
  }
  while (weights < microbatches) order.push_back({Work::weight_gradients, weights++});
  return order;
}

// When tensors of a micro-batch are there, by stage.
using Arrivals = std::vector<std::vector<double>>;

// Runs each stage in its order, as soon as tensors are there.
IdealStep run(const std::vector<Order>& orders, std::int64_t microbatches) {
  const std::size_t stages = orders.size();
  Arrivals activations(stages, std::vector<double>(static_cast<std::size_t>(microbatches), kNever));
  Arrivals gradients = activations;
  std::ranges::fill(activations.front(), 0);
  IdealStep step(stages);
  for (bool progressed = true; std::exchange(progressed, false);) {
    for (std::size_t stage = 0; stage < stages; ++stage) {
      auto& spans = step[stage];
      while (spans.size() < orders[stage].size()) {
        const auto [work, microbatch] = orders[stage][spans.size()];
        const auto m = static_cast<std::size_t>(microbatch);
        double begin = spans.empty() ? 0 : spans.back().end;
        if (work != Work::weight_gradients) {
          begin = std::max(begin, (work == Work::forward ? activations : gradients)[stage][m]);
        }
        if (begin == kNever) break;
        const double end = begin + time_of(work);
        spans.push_back({work, microbatch, begin, end});
        progressed = true;
        if (work == Work::forward) {
          (stage + 1 < stages ? activations[stage + 1] : gradients[stage])[m] = end;
        } else if (work != Work::weight_gradients && stage > 0) {
          gradients[stage - 1][m] = end;
        }
      }
    }
  }
  return step;
}

}  // namespace

IdealStep simulate(IdealSchedule schedule, int stages, std::int64_t microbatches) {
  std::vector<Order> orders;
  for (int stage = 0; stage < stages; ++stage) {
    switch (schedule) {
      case IdealSchedule::model_parallel:
        orders.push_back(as_pipelines_run(PipelineSchedule::gpipe, stage, stages, 1));
        break;
      case IdealSchedule::gpipe:
        orders.push_back(as_pipelines_run(PipelineSchedule::gpipe, stage, stages, microbatches));
        break;
      case IdealSchedule::one_f_one_b:
        orders.push_back(
            as_pipelines_run(PipelineSchedule::one_f_one_b, stage, stages, microbatches));
        break;
      case IdealSchedule::zero_bubble:
        orders.push_back(zero_bubble(stage, stages, microbatches));
        break;
    }
  }
  if (schedule != IdealSchedule::model_parallel) return run(orders, microbatches);
  IdealStep step = run(orders, 1);
  const auto factor = static_cast<double>(microbatches);
  for (auto& spans : step) {
    for (IdealSpan& span : spans) span = {span.work, 0, span.begin * factor, span.end * factor};
  }
  return step;
}

double end_of(const IdealStep& step) {
  double end = 0;
  for (const auto& spans : step) end = std::max(end, spans.back().end);
  return end;
}

double bubble_of(const IdealStep& step) {
  double busy = 0;
  for (const auto& spans : step) {
    for (const IdealSpan& span : spans) busy += span.end - span.begin;
  }
  return 1 - busy / (end_of(step) * static_cast<double>(step.size()));
}

}  // namespace paceline::bench
