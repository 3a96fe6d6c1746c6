#include "parallel/ddp/reduction_cost.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "distributed/bucket_reducer.h"

namespace paceline::ddp {
namespace {

using distributed::BucketReducer;

constexpr std::size_t kMostBytes = std::size_t{25} << 20;
// The fastest round counts: in the first one, memory is touched for the first time, and in any of
// them another process may take a core.
constexpr int kRounds = 4;

// Microseconds that the fastest of some reductions takes.
double time_of(const ProcessGroup& group, std::int64_t count) {
  BucketReducer::Options options;
  options.buckets.push_back({count, at::kFloat, at::kCPU, BucketReducer::Op::average});
  options.describe = [](std::size_t) { return "measuring what a reduction costs"; };
  const auto reducer = distributed::make_bucket_reducer(group.c10d(), options);
  reducer->tensor(0).zero_();
  double fastest = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    reducer->begin_step({}, {}, {});
    reducer->publish(0);
    reducer->finish();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    fastest = std::min(fastest, time.count());
  }
  return fastest;
}

}  // namespace

trace::ReductionCost reduction_cost(const ProcessGroup& group, std::size_t bytes) {
  constexpr std::size_t kElement = sizeof(float);
  const std::size_t count = std::clamp(bytes, 2 * kElement, kMostBytes) / kElement;
  const double latency = time_of(group, 1);
  const double time = time_of(group, static_cast<std::int64_t>(count));
  // The time of a small bucket may be below the noise of the other.
  constexpr double kLeast = 0.1;
  return {latency, static_cast<double>(count * kElement) / std::max(time - latency, kLeast)};
}

}  // namespace paceline::ddp
