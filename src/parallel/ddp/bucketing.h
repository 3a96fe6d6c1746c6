#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace paceline::ddp {

// Where a parameter's gradient lies: `offset` elements into bucket `bucket`.
struct Place {
  std::size_t bucket;
  std::int64_t offset;
};

struct BucketPlan {
  struct Bucket {
    std::int64_t count = 0;  // elements, those between gradients included
    at::ScalarType type;
    at::Device device;
    std::vector<std::size_t> parameters;
  };
  std::vector<Bucket> buckets;  // in the order in which they are likely to be ready
  std::vector<Place> places;    // by parameter
};

// Gradients become ready in roughly the reverse of the order in which layers were registered, so
// buckets are filled in that order. A bucket holds one type and device, and at most `cap_bytes`
// (the first of each type and device `first_bytes`) unless one parameter alone is larger. Every
// gradient starts on a cache line.
BucketPlan plan_buckets(const std::vector<at::Tensor>& parameters, std::size_t first_bytes,
                        std::size_t cap_bytes);

}  // namespace paceline::ddp
