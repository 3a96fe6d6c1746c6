#include "backends/paceline/overlap.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "distributed/start.h"

namespace paceline::backends {
namespace {

const std::byte* begin_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

struct Axis {
  std::int64_t count;
  std::int64_t stride;  // in bytes
};

// The bytes of a tensor, or of a part of it: a run at each position along the axes. The first axis
// has the largest stride.
struct Block {
  std::int64_t begin;  // an address
  std::span<const Axis> axes;
  std::int64_t run;

  std::int64_t end() const {
    std::int64_t last = begin;
    for (const Axis& axis : axes) last += (axis.count - 1) * axis.stride;
    return last + run;
  }
  std::int64_t stride() const { return axes.empty() ? 0 : axes.front().stride; }
  // At a position along the first axis; positions outside of the block stand for shifts.
  Block at(std::int64_t position) const {
    return {begin + position * stride(), axes.subspan(1), run};
  }
};

std::int64_t floor_of(std::int64_t dividend, std::int64_t divisor) {
  return dividend / divisor - (dividend % divisor < 0 ? 1 : 0);
}

// Exact, and allocates nothing. Walks along the axis with the larger stride, only where the other
// block is. If both blocks have that stride, as columns of one matrix have, only the distance of
// two positions counts.
bool share_bytes(const Block& a, const Block& b) {
  if (a.end() <= b.begin || b.end() <= a.begin) return false;
  if (a.axes.empty() && b.axes.empty()) return true;
  if (a.stride() < b.stride()) return share_bytes(b, a);
  const bool aligned = a.stride() == b.stride();
  const Block other = aligned ? b.at(0) : b;
  const Block first = a.at(0);
  const std::int64_t low = floor_of(other.begin - first.end(), a.stride()) + 1;
  const std::int64_t high = -floor_of(first.begin - other.end(), a.stride()) - 1;
  const std::int64_t lowest = aligned ? 1 - b.axes.front().count : 0;
  const std::int64_t highest = std::min(high, a.axes.front().count - 1);
  for (std::int64_t position = std::max(low, lowest); position <= highest; ++position) {
    if (share_bytes(a.at(position), other)) return true;
  }
  return false;
}

// What a call reads or writes of a tensor.
class Footprint {
 public:
  Footprint(const at::Tensor& tensor, bool is_written)
      : tensor_(&tensor), written_(is_written), run_(tensor.element_size()) {
    const std::int64_t element = tensor.element_size();
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.size(i) > 1) axes_.push_back({tensor.size(i), tensor.stride(i) * element});
    }
    std::sort(axes_.begin(), axes_.end(),
              [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    // Runs that touch are one run.
    for (; !axes_.empty() && axes_.back().stride <= run_; axes_.pop_back()) {
      run_ += (axes_.back().count - 1) * axes_.back().stride;
    }
  }
  const at::Tensor& tensor() const { return *tensor_; }
  bool written() const { return written_; }
  Block block() const {
    return {static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(begin_of(*tensor_))), axes_,
            run_};
  }

 private:
  const at::Tensor* tensor_;
  bool written_;
  std::int64_t run_;
  std::vector<Axis> axes_;
};

}  // namespace

void check_apart(const Tensors& outputs, const Tensors& inputs, const char* operation) {
  std::vector<Footprint> all;
  for (const at::Tensor& output : outputs) {
    distributed::check_no_overlap(output, operation);
    if (output.numel() > 0) all.emplace_back(output, true);
  }
  for (const at::Tensor& input : inputs) {
    if (input.numel() > 0) all.emplace_back(input, false);
  }
  std::sort(all.begin(), all.end(), [](const Footprint& a, const Footprint& b) {
    return begin_of(a.tensor()) < begin_of(b.tensor());
  });
  for (auto one = all.begin(); one != all.end(); ++one) {
    const Block block = one->block();
    for (auto other = one + 1; other != all.end() && other->block().begin < block.end(); ++other) {
      if (!one->written() && !other->written()) continue;
      if (!share_bytes(block, other->block())) continue;
      const at::Tensor& written = (one->written() ? one : other)->tensor();
      throw UsageError(fmt::format(
          "{} writes a tensor of {} {} that shares memory with another of its tensors: outputs "
          "must not overlap each other, nor any input except this rank's own part",
          operation, written.numel(), c10::toString(written.scalar_type())));
    }
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
  if (input.numel() == output.numel()) return {};  // a group of one, or no elements
  const at::Tensor flat = input.detach().view({-1});
  const std::int64_t begin = own * output.numel();
  const std::int64_t end = begin + output.numel();
  return {flat.slice(0, 0, begin), flat.slice(0, end)};
}

}  // namespace paceline::backends
