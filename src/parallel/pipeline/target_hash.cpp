#include "parallel/pipeline/target_hash.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>

#include "base/hash.h"

namespace paceline::pipeline {
namespace {

constexpr std::int64_t kBytes = 65536;

// A part of the tensor whose elements are its first, at least kBytes if it has as many.
at::Tensor head_of(at::Tensor tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    const std::int64_t bytes_of_each = static_cast<std::int64_t>(tensor.nbytes()) / tensor.size(d);
    const std::int64_t used = (kBytes + bytes_of_each - 1) / bytes_of_each;
    tensor = tensor.narrow(d, 0, std::min(used, tensor.size(d)));
    if (tensor.size(d) > 1) break;
  }
  return tensor;
}

}  // namespace

TargetHash hash_of(const at::Tensor& target) {
  if (!target.defined() || !target.is_cpu() || target.layout() != at::kStrided ||
      target.numel() == 0) {
    return {};
  }
  const at::Tensor head = head_of(target.detach()).resolve_conj().resolve_neg().contiguous();
  const auto form = base::hash(
      fmt::format("{} {}", static_cast<int>(target.scalar_type()), fmt::join(target.sizes(), " ")));
  const auto bytes = base::hash({static_cast<const char*>(head.const_data_ptr()),
                                 std::min(head.nbytes(), static_cast<std::size_t>(kBytes))});
  return {.form = static_cast<std::int64_t>(form), .bytes = static_cast<std::int64_t>(bytes)};
}

}  // namespace paceline::pipeline
