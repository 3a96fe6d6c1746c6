#include "backends/paceline/shm_bucket_reducer.h"

#include <ATen/ATen.h>

#include "backends/paceline/tensors.h"

namespace paceline::backends {
namespace {

std::vector<shm::BucketReducer::Bucket> to_node(
    const std::vector<distributed::BucketReducer::Bucket>& buckets) {
  std::vector<shm::BucketReducer::Bucket> result;
  for (const auto& bucket : buckets) {
    const bool maximum = bucket.op == distributed::BucketReducer::Op::max;
    const Reduction how = reduction(maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::AVG,
                                    bucket.type, "DistributedDataParallel");
    result.push_back({static_cast<std::size_t>(bucket.count), how.type, how.op});
  }
  return result;
}

std::vector<std::size_t> in_place_sizes(
    const std::vector<distributed::BucketReducer::Bucket>& buckets) {
  std::vector<std::size_t> sizes;
  for (const auto& bucket : buckets) {
    if (!bucket.in_place) continue;
    sizes.push_back(static_cast<std::size_t>(bucket.count) * c10::elementSize(bucket.type));
  }
  return sizes;
}

}  // namespace

ShmBucketReducer::ShmBucketReducer(shm::Group& group, const std::vector<Bucket>& buckets,
                                   Describe describe, std::uint32_t steps,
                                   const std::vector<std::string>& parameters)
    : reducer_(group, to_node(buckets), std::move(describe), steps, parameters),
      gradients_(group.region(), in_place_sizes(buckets)) {
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto& memory = reducer_.data(b);
    tensors_.push_back(at::from_blob(
        memory.get(), {buckets[b].count}, [memory](void*) {}, at::dtype(buckets[b].type)));
  }
}

}  // namespace paceline::backends
