#include "backends/paceline/overlap.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <span>

#include "distributed/start.h"

namespace paceline::backends {
namespace {

const std::byte* begin_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

// From a tensor's first element to its last.
struct Extent {
  Extent(const at::Tensor& one, bool is_written)
      : tensor(&one), written(is_written), begin(begin_of(one)) {
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < one.dim(); ++i) last += (one.size(i) - 1) * one.stride(i);
    end = begin + static_cast<std::size_t>(last + 1) * one.element_size();
  }
  bool dense() const { return tensor->is_non_overlapping_and_dense(); }

  const at::Tensor* tensor;
  bool written;
  const std::byte* begin;
  const std::byte* end;
};

// The bytes of a tensor in `mask`, which has one for each byte from `begin` on.
at::Tensor bytes_in(const at::Tensor& mask, const std::byte* begin, const Extent& extent) {
  auto sizes = extent.tensor->sizes().vec();
  auto strides = extent.tensor->strides().vec();
  const auto element = static_cast<std::int64_t>(extent.tensor->element_size());
  for (std::int64_t& stride : strides) stride *= element;
  sizes.push_back(element);
  strides.push_back(1);
  return mask.as_strided(sizes, strides, extent.begin - begin);
}

// Of extents, those written first, that overlap in a row from `begin` to `end`.
bool share_bytes(std::span<const Extent> row, const std::byte* begin, const std::byte* end) {
  if (std::all_of(row.begin(), row.end(), [](const Extent& one) { return one.dense(); })) {
    return true;
  }
  const at::Tensor mask = at::zeros({end - begin}, at::kBool);
  return std::any_of(row.begin(), row.end(), [&](const Extent& one) {
    const at::Tensor bytes = bytes_in(mask, begin, one);
    if (bytes.any().item<bool>()) return true;
    if (one.written) bytes.fill_(true);
    return false;
  });
}

}  // namespace

void check_apart(const Tensors& outputs, const Tensors& inputs, const char* operation) {
  std::vector<Extent> extents;
  for (const at::Tensor& output : outputs) {
    distributed::check_no_overlap(output, operation);
    if (output.numel() > 0) extents.emplace_back(output, true);
  }
  for (const at::Tensor& input : inputs) {
    if (input.numel() > 0) extents.emplace_back(input, false);
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (auto first = extents.begin(); first != extents.end();) {
    const std::byte* const begin = first->begin;
    const std::byte* end = first->end;
    auto last = first + 1;
    for (; last != extents.end() && last->begin < end; ++last) end = std::max(end, last->end);
    const std::span row(first, last);
    first = last;
    const auto reads = std::stable_partition(row.begin(), row.end(),
                                             [](const Extent& one) { return one.written; });
    if (row.size() == 1 || reads == row.begin() || !share_bytes(row, begin, end)) continue;
    throw UsageError(fmt::format(
        "{} writes a tensor of {} {} that shares memory with another of its tensors: outputs must "
        "not overlap each other, nor inputs but this rank's own part",
        operation, row.front().tensor->numel(), c10::toString(row.front().tensor->scalar_type())));
  }
}

bool is_in_place(const at::Tensor& part, const at::Tensor& whole, int index) {
  return part.is_same(whole) ||
         (part.is_contiguous() && whole.is_contiguous() &&
          begin_of(part) == begin_of(whole) + static_cast<std::size_t>(index) * part.nbytes());
}

Tensors without_own(const Tensors& inputs, int own, const at::Tensor& output) {
  Tensors others = inputs;
  const auto mine = others.begin() + own;
  if (is_in_place(*mine, output)) others.erase(mine);
  return others;
}

Tensors without_own_part(const at::Tensor& input, int own, const at::Tensor& output) {
  if (!is_in_place(output, input, own)) return {input};
  const at::Tensor flat = input.detach().view({-1});
  const std::int64_t begin = own * output.numel();
  const std::int64_t end = begin + output.numel();
  return {flat.slice(0, 0, begin), flat.slice(0, end)};
}

}  // namespace paceline::backends
