#pragma once

#include <cstdint>
#include <vector>

#include <paceline/pipeline.h>

namespace paceline::pipeline {

// What a stage does in a step, without times.
struct Action {
  PipelineAction::Kind kind;
  std::int64_t microbatch;

  bool operator==(const Action&) const = default;
};

// The actions of stage `stage` of `stages`, in order.
std::vector<Action> actions_of(PipelineSchedule schedule, int stage, int stages,
                               std::int64_t microbatches);

}  // namespace paceline::pipeline
