#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "shm/kernels/types.h"

namespace paceline::distributed {

// The type's name in shm; none if shm has none, and moves it as bytes.
std::optional<shm::DataType> data_type_of(at::ScalarType type);

}  // namespace paceline::distributed
