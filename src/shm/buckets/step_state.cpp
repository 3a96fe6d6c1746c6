#include "shm/buckets/step_state.h"

namespace paceline::shm {
namespace {

using BucketWords = ControlBlocks::BucketWords;

const char* phase_of(const ControlBlocks& blocks, int rank, std::uint32_t step) {
  const auto& progress = blocks.progress(rank);
  if (Region::reached(progress.finished, step)) return "finished";
  if (Region::reached(progress.aborted, step)) return "aborted";
  if (blocks.has_completed(rank)) return "waits";
  return blocks.has_begun(rank) ? "backward" : "forward";
}

}  // namespace

std::vector<StepState> read_step_states(const ControlBlocks& blocks) {
  std::vector<StepState> states;
  const std::uint32_t step = blocks.step();
  for (int rank = 0; rank < blocks.size(); ++rank) {
    StepState state{.rank = blocks.region().global_ranks().of(rank)};
    for (std::size_t bucket = 0; bucket < blocks.buckets().size(); ++bucket) {
      state.ready += blocks.reached(rank, bucket, &BucketWords::published) ? 1 : 0;
      state.reduced += blocks.reached(rank, bucket, &BucketWords::reduced) ? 1 : 0;
    }
    state.last = blocks.progress(rank).last.load(std::memory_order_relaxed);
    state.phase = phase_of(blocks, rank, step);
    states.push_back(state);
  }
  return states;
}

}  // namespace paceline::shm
