#include "backends/paceline/shm_bucket_reducer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <bit>
#include <optional>
#include <tuple>

#include "backends/paceline/state.h"
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

// Leaves are added up like the digits of a binary counter, so there are several gradients at once.
std::vector<std::size_t> in_place_sizes(const distributed::BucketReducer::Options& options,
                                        int rank) {
  const int leaves = options.leaves ? options.leaves->range(rank).count : 1;
  const auto gradients = static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(leaves)));
  std::vector<std::size_t> sizes;
  for (const auto& bucket : options.buckets) {
    if (!bucket.in_place) continue;
    const auto size = static_cast<std::size_t>(bucket.count) * c10::elementSize(bucket.type);
    sizes.insert(sizes.end(), gradients, size);
  }
  return sizes;
}

}  // namespace

ShmBucketReducer::ShmBucketReducer(shm::Group& group, const Options& options,
                                   const std::shared_ptr<shm::SecondLevel>& between_nodes)
    : reducer_(group, to_shm_buckets(options.buckets), options.describe,
               {.steps = options.steps,
                .parameters = options.parameters,
                .between_nodes = between_nodes,
                .leaves = between_nodes ? std::nullopt : options.leaves,
                .sums = options.sums,
                .own_pages = options.staged,
                .notes_thread = !options.on_autograd_thread}),
      gradients_(group.region(), in_place_sizes(options, group.region()->rank())),
      source_("steps", [this] { return describe_step(reducer_.blocks()); }) {
  if (options.extra_time.count() > 0) reducer_.extend_timeout(options.extra_time);
  const auto as_tensor = [](const std::shared_ptr<std::byte>& memory, std::int64_t count,
                            at::ScalarType type) {
    return at::from_blob(
        memory.get(), {count}, [memory](void*) {}, at::dtype(type));
  };
  for (std::size_t b = 0; b < options.buckets.size(); ++b) {
    const auto& [count, type] = std::tie(options.buckets[b].count, options.buckets[b].type);
    tensors_.push_back(as_tensor(reducer_.data(b), count, type));
    parts_.emplace_back();
    for (const auto& memory : reducer_.parts(b)) {
      parts_[b].push_back(as_tensor(memory, count, at::toOpMathType(type)));
    }
  }
}

}  // namespace paceline::backends
