#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "shm/kernels/types.h"

namespace paceline::distributed {

// The type's name in shm; none if shm does not reduce it.
std::optional<shm::DataType> data_type_of(at::ScalarType type);
// Also of types that are only moved; `byte` if it has no name.
shm::DataType moved_type_of(at::ScalarType type);

}  // namespace paceline::distributed
