#include "backends/paceline/tensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <optional>

namespace paceline::backends {
namespace {

std::optional<node::DataType> known_type(at::ScalarType type) {
  using node::DataType;
  switch (type) {
    case at::kFloat:
      return DataType::float32;
    case at::kDouble:
      return DataType::float64;
    case at::kBFloat16:
      return DataType::bfloat16;
    case at::kLong:
      return DataType::int64;
    case at::kHalf:
      return DataType::float16;
    case at::kChar:
      return DataType::int8;
    case at::kByte:
      return DataType::uint8;
    case at::kShort:
      return DataType::int16;
    case at::kInt:
      return DataType::int32;
    case at::kBool:
      return DataType::boolean;
    case at::kComplexFloat:
      return DataType::complex64;
    case at::kComplexDouble:
      return DataType::complex128;
    default:
      return std::nullopt;
  }
}

void check(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) throw UsageError(fmt::format("{} of an undefined tensor", operation));
  if (tensor.device().is_cpu() && tensor.layout() == at::kStrided) return;
  throw UsageError(
      fmt::format("{} of a {} tensor on {}: the backend paceline takes dense tensors on "
                  "the CPU",
                  operation, c10::str(tensor.layout()), tensor.device().str()));
}

}  // namespace

at::Tensor single(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.size() != 1) {
    throw UsageError(
        fmt::format("{} of {} tensors at once: one is expected", operation, tensors.size()));
  }
  check(tensors.front(), operation);
  return tensors.front();
}

std::vector<at::Tensor> parts_like(const std::vector<std::vector<at::Tensor>>& lists,
                                   const at::Tensor& like, int size, const char* operation) {
  if (lists.size() != 1 || lists.front().size() != static_cast<std::size_t>(size)) {
    throw UsageError(
        fmt::format("{} with {} tensors in a group of {} ranks: one for each rank is "
                    "expected",
                    operation, lists.empty() ? 0 : lists.front().size(), size));
  }
  for (const at::Tensor& part : lists.front()) {
    check(part, operation);
    if (part.numel() != like.numel() || part.scalar_type() != like.scalar_type()) {
      throw UsageError(fmt::format(
          "{}: a tensor of {} {} beside one of {} {}; all must have the same shape and type",
          operation, part.numel(), c10::toString(part.scalar_type()), like.numel(),
          c10::toString(like.scalar_type())));
    }
  }
  return lists.front();
}

void check_concatenation(const at::Tensor& whole, const at::Tensor& part, int size,
                         const char* operation) {
  check(whole, operation);
  check(part, operation);
  if (whole.numel() == size * part.numel() && whole.scalar_type() == part.scalar_type()) return;
  throw UsageError(
      fmt::format("{}: {} elements of {} do not make up {} ranks with {} elements of {} each",
                  operation, whole.numel(), c10::toString(whole.scalar_type()), size, part.numel(),
                  c10::toString(part.scalar_type())));
}

node::DataType node_type(at::ScalarType type, const char* operation) {
  const auto known = known_type(type);
  if (known && node::is_reducible(*known)) return *known;
  throw UsageError(
      fmt::format("{} of {}: the backend paceline reduces Float, Double, BFloat16 and Long",
                  operation, c10::toString(type)));
}

node::ReduceOp reduce_op(const c10d::ReduceOp& op, const at::Tensor& tensor,
                         const char* operation) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return node::ReduceOp::sum;
    case c10d::ReduceOp::MIN:
      return node::ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return node::ReduceOp::max;
    case c10d::ReduceOp::AVG:
      if (tensor.is_floating_point()) return node::ReduceOp::avg;
      throw UsageError(fmt::format("{} of {} with AVG: an average takes a floating type", operation,
                                   c10::toString(tensor.scalar_type())));
    default:
      throw UsageError(
          fmt::format("{}: the backend paceline reduces with SUM, AVG, MIN and MAX", operation));
  }
}

std::pair<std::size_t, node::DataType> moved(const at::Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  if (const auto known = known_type(tensor.scalar_type())) return {count, *known};
  return {count * tensor.element_size(), node::DataType::byte};
}

Contiguous::Contiguous(const at::Tensor& tensor, Use use) : tensor_(tensor.detach()) {
  if (tensor_.is_contiguous()) {
    dense_ = tensor_;
  } else if (use == Use::out) {
    dense_ = at::empty(tensor_.sizes(), tensor_.options());
  } else {
    dense_ = tensor_.contiguous();
  }
}

std::vector<void*> Contiguous::slices(int parts) const {
  auto* const begin = static_cast<std::byte*>(pointer());
  const std::size_t bytes = dense_.nbytes() / static_cast<std::size_t>(parts);
  std::vector<void*> result;
  for (int part = 0; part < parts; ++part) {
    result.push_back(begin + static_cast<std::size_t>(part) * bytes);
  }
  return result;
}

void Contiguous::write_back() const {
  if (!dense_.is_same(tensor_)) tensor_.copy_(dense_);
}

ContiguousList::ContiguousList(const std::vector<at::Tensor>& tensors, Contiguous::Use use) {
  for (const at::Tensor& tensor : tensors) parts_.emplace_back(tensor, use);
}

std::vector<void*> ContiguousList::pointers() const {
  std::vector<void*> result;
  for (const Contiguous& part : parts_) result.push_back(part.pointer());
  return result;
}

void ContiguousList::write_back() const {
  for (const Contiguous& part : parts_) part.write_back();
}

}  // namespace paceline::backends
