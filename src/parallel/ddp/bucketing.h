#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace paceline::ddp {

// Where a parameter's gradient is stored: `offset` elements into bucket `bucket`.
struct Place {
  std::size_t bucket;
  std::int64_t offset;
};

struct BucketPlan {
  struct Bucket {
    std::int64_t count = 0;  // elements, including padding
    at::ScalarType type;
    at::Device device;
    std::vector<std::size_t> parameters;
    bool dedicated = false;  // holds one gradient, without padding
  };
  std::vector<Bucket> buckets;  // in the order in which they are likely to be ready
  std::vector<Place> places;    // by parameter, if it is in a bucket
};

struct BucketLimits {
  // By bucket of a type and device, in bytes; the last holds for all further buckets. A single
  // gradient may be larger.
  std::vector<std::size_t> caps;
  // A gradient of at least this many bytes gets a dedicated bucket.
  std::size_t dedicated;
  // By parameter, if any: whether all buckets end with it.
  std::vector<bool> ends{};
};

// Appends buckets that hold the parameters with the numbers in `order`, in that order. A bucket
// holds one type and device. Every gradient starts on a cache line.
void add_buckets(BucketPlan& plan, const std::vector<at::Tensor>& parameters,
                 std::span<const std::size_t> order, const BucketLimits& limits);

}  // namespace paceline::ddp
