#pragma once

#include <paceline/distributed.h>

#include <optional>
#include <string>

#include "models/models.h"
#include "result.h"
#include "rounds.h"

namespace paceline::bench {

// A step of training (zero_grad, forward, loss, backward, SGD): on each rank alone ("none"), with
// one barrier before SGD's step, under our DDP on the world and on Gloo, and as PyTorch's DDP does
// it in C++ and, if there is a `python` with torch, in Python. Collective over the world; complete
// on rank 0.
Result measure_training_step(const std::optional<ProcessGroup>& gloo, const models::Model& model,
                             const std::string& python, const RoundPlan& plan);

}  // namespace paceline::bench
