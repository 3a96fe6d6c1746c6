#include "parallel/ddp/bucketing.h"

#include <map>
#include <utility>

namespace paceline::ddp {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

BucketPlan plan_buckets(const std::vector<at::Tensor>& parameters, std::size_t first_bytes,
                        std::size_t cap_bytes) {
  struct Filling {
    std::size_t bucket;
    std::size_t cap;
  };
  BucketPlan plan;
  plan.places.resize(parameters.size());
  std::map<std::pair<at::ScalarType, std::string>, Filling> filling;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const at::Tensor& parameter = parameters[i];
    const auto element = parameter.element_size();
    const auto line = static_cast<std::int64_t>(kLine / element);
    const auto key = std::pair(parameter.scalar_type(), parameter.device().str());
    const auto open_bucket = [&] {
      plan.buckets.push_back({0, parameter.scalar_type(), parameter.device(), {}});
      return plan.buckets.size() - 1;
    };
    auto found = filling.find(key);
    if (found == filling.end()) {
      found = filling.emplace(key, Filling{open_bucket(), first_bytes}).first;
    }
    Filling& current = found->second;
    const auto bytes_used = static_cast<std::size_t>(plan.buckets[current.bucket].count) * element;
    if (bytes_used > 0 && bytes_used + parameter.nbytes() > current.cap) {
      current = {open_bucket(), cap_bytes};
    }
    auto& bucket = plan.buckets[current.bucket];
    plan.places[i] = {current.bucket, bucket.count};
    bucket.count += (parameter.numel() + line - 1) / line * line;
    bucket.parameters.push_back(i);
  }
  return plan;
}

}  // namespace paceline::ddp
