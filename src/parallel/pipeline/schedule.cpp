#include "parallel/pipeline/schedule.h"

#include <algorithm>

namespace paceline::pipeline {

std::vector<Action> actions_of(PipelineSchedule schedule, int stage, int stages,
                               std::int64_t microbatches) {
  using Kind = PipelineAction::Kind;
  // How many forwards are ahead of backwards. In 1F1B, this stage's first backward comes as soon as
  // the later stages have run the first micro-batch.
  const std::int64_t ahead = schedule == PipelineSchedule::gpipe
                                 ? microbatches
                                 : std::min<std::int64_t>(microbatches, stages - stage);
  std::vector<Action> actions;
  for (std::int64_t i = 0; i < microbatches + ahead; ++i) {
    if (i < microbatches) actions.push_back({Kind::forward, i});
    // After the last of the `ahead` forwards that fill the pipeline, the first backward runs.
    if (i + 1 >= ahead && i + 1 - ahead < microbatches) {
      actions.push_back({Kind::backward, i + 1 - ahead});
    }
  }
  return actions;
}

}  // namespace paceline::pipeline
