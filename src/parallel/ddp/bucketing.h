#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
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
  std::vector<Place> places;    // by parameter; of those in a bucket
};

// Appends buckets that hold the parameters with the numbers in `order`, in that order. A bucket
// holds one type and device, and unless one parameter alone is larger, no more bytes than its cap:
// the k-th of its type and device caps[k], those beyond the last cap as much as that. Every
// gradient starts on a cache line.
void add_buckets(BucketPlan& plan, const std::vector<at::Tensor>& parameters,
                 std::span<const std::size_t> order, std::span<const std::size_t> caps);

}  // namespace paceline::ddp
