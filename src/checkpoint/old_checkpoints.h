#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include <paceline/checkpoint_directory.h>

#include "checkpoint/checkpoint_place.h"

namespace paceline::checkpoint {

// The checkpoints to remove once that of `step` is complete: hidden ones, and named ones that the
// options do not keep.
std::vector<Place> old_places(const std::filesystem::path& directory, std::int64_t step,
                              const CheckpointOptions& options);

// Hides a checkpoint first, so that nobody sees a part of it. One that cannot be removed keeps its
// name. Throws std::filesystem::filesystem_error.
void remove(const Place& place);

}  // namespace paceline::checkpoint
