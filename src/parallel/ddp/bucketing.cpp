#include "parallel/ddp/bucketing.h"

#include <algorithm>
#include <map>
#include <utility>

namespace paceline::ddp {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

void add_buckets(BucketPlan& plan, const std::vector<at::Tensor>& parameters,
                 std::span<const std::size_t> order, const BucketLimits& limits) {
  struct Filling {
    std::size_t bucket;
    std::size_t number;  // of its type and device
  };
  plan.places.resize(parameters.size());
  std::map<std::pair<at::ScalarType, std::string>, Filling> filling;
  const auto ends = [&](std::size_t i) { return !limits.ends.empty() && limits.ends[i]; };
  for (const std::size_t i : order) {
    const at::Tensor& parameter = parameters[i];
    const auto element = parameter.element_size();
    const auto line = static_cast<std::int64_t>(kLine / element);
    const auto key = std::pair(parameter.scalar_type(), parameter.device().str());
    const auto open_bucket = [&] {
      plan.buckets.push_back({0, parameter.scalar_type(), parameter.device(), {}});
      return plan.buckets.size() - 1;
    };
    if (parameter.nbytes() >= limits.dedicated) {
      plan.places[i] = {open_bucket(), 0};
      auto& bucket = plan.buckets.back();
      bucket.count = parameter.numel();
      bucket.parameters = {i};
      bucket.dedicated = true;
      if (ends(i)) filling.clear();
      continue;
    }
    auto found = filling.find(key);
    if (found == filling.end()) found = filling.emplace(key, Filling{open_bucket(), 0}).first;
    Filling& current = found->second;
    const auto bytes_used = static_cast<std::size_t>(plan.buckets[current.bucket].count) * element;
    const std::size_t cap = limits.caps[std::min(current.number, limits.caps.size() - 1)];
    if (bytes_used > 0 && bytes_used + parameter.nbytes() > cap) {
      current = {open_bucket(), current.number + 1};
    }
    auto& bucket = plan.buckets[current.bucket];
    plan.places[i] = {current.bucket, bucket.count};
    bucket.count += (parameter.numel() + line - 1) / line * line;
    bucket.parameters.push_back(i);
    if (ends(i)) filling.clear();
  }
}

}  // namespace paceline::ddp
