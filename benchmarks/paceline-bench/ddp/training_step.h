#pragma once

#include "measure/other_groups.h"
#include "measure/result.h"
#include "measure/rounds.h"
#include "models/models.h"
#include "options.h"

namespace paceline::bench {

// A step of training (zero_grad, forward, loss, backward, SGD): on each rank alone ("none"), with
// one barrier before SGD's step, under our DDP on the world and on the others, and as PyTorch's DDP
// does it in C++ over Gloo and, in Python, over each of the backends that `options` name.
// Collective over the world; complete on rank 0.
Result measure_training_step(const OtherGroups& others, const models::Model& model,
                             const Options& options, const RoundPlan& plan);

// A step of several micro-batches on each rank, under our DDP: accumulated under no_sync
// ("accumulation"), and each as a logical rank of its own ("logical_ranks"). Collective over the
// world; complete on rank 0.
Result measure_accumulation(const models::Model& model, int micro_batches, const RoundPlan& plan);

}  // namespace paceline::bench
