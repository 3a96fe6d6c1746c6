#include "backends/paceline/node_channel.h"

#include <ATen/ATen.h>

#include "backends/paceline/tensors.h"

namespace paceline::backends {
namespace {

std::vector<node::Channel::Bucket> to_node(
    const std::vector<distributed::BucketChannel::Bucket>& buckets) {
  std::vector<node::Channel::Bucket> result;
  for (const auto& bucket : buckets) {
    const bool maximum = bucket.op == distributed::BucketChannel::Op::max;
    const Reduction how = reduction(maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::AVG,
                                    bucket.type, "DistributedDataParallel");
    result.push_back({static_cast<std::size_t>(bucket.count), how.type, how.op});
  }
  return result;
}

std::vector<std::size_t> adopted_sizes(
    const std::vector<distributed::BucketChannel::Bucket>& buckets) {
  std::vector<std::size_t> sizes;
  for (const auto& bucket : buckets) {
    if (!bucket.adopts) continue;
    sizes.push_back(static_cast<std::size_t>(bucket.count) * c10::elementSize(bucket.type));
  }
  return sizes;
}

}  // namespace

NodeChannel::NodeChannel(node::Group& group, const std::vector<Bucket>& buckets, Describe describe,
                         std::uint32_t steps, const std::vector<std::string>& parameters)
    : channel_(group, to_node(buckets), std::move(describe), steps, parameters),
      gradients_(group.region(), adopted_sizes(buckets)) {
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto& memory = channel_.data(b);
    tensors_.push_back(at::from_blob(
        memory.get(), {buckets[b].count}, [memory](void*) {}, at::dtype(buckets[b].type)));
  }
}

}  // namespace paceline::backends
