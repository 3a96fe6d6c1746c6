#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::node {

// The element types that reductions know. Moving collectives (broadcast, all_gather) take bytes,
// and carry the type only so that ranks which disagree about it are found out.
enum class DataType : std::uint8_t { byte, float32, float64, bfloat16, int64 };

// avg is defined for floating types only.
enum class ReduceOp : std::uint8_t { sum, avg, min, max };

std::size_t element_size(DataType type);
const char* name(DataType type);
const char* name(ReduceOp op);

}  // namespace paceline::node
