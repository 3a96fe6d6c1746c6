#include "backends/paceline/shm_bucket_reducer.h"

#include <ATen/ATen.h>

#include "backends/paceline/tensors.h"

namespace paceline::backends {
namespace {

std::vector<shm::BucketReducer::Bucket> to_shm_buckets(
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

ShmBucketReducer::ShmBucketReducer(shm::Group& group, const Options& options)
    : reducer_(group, to_shm_buckets(options.buckets), options.describe, options.steps,
               options.parameters),
      gradients_(group.region(), in_place_sizes(options.buckets)) {
  if (options.extra_time.count() > 0) reducer_.extend_timeout(options.extra_time);
  for (std::size_t b = 0; b < options.buckets.size(); ++b) {
    const auto& memory = reducer_.data(b);
    tensors_.push_back(at::from_blob(
        memory.get(), {options.buckets[b].count}, [memory](void*) {},
        at::dtype(options.buckets[b].type)));
  }
}

}  // namespace paceline::backends
