#pragma once

#include <string>

#include "measure/result.h"

namespace paceline::bench {

// Whole jobs of ranks that form a world, meet once in a barrier and leave, from the start of the
// launcher to its end: under `paceline run`, and under torchrun if `python` can import torch, of
// this program's ranks and of Python's own over Gloo. Throws Error if a job fails.
Result measure_launch(int ranks, int rounds, const std::string& python);

}  // namespace paceline::bench
