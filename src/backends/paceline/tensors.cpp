#include "backends/paceline/tensors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <numeric>

#include "distributed/data_type.h"

namespace paceline::backends {
namespace {

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} {}", tensor.numel(), c10::toString(tensor.scalar_type()));
}

}  // namespace

void check_dense(const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) throw UsageError(fmt::format("{} of an undefined tensor", operation));
  if (tensor.is_quantized()) {
    throw UsageError(fmt::format(
        "{} of a quantized tensor: its scale would not be moved; use int_repr() or dequantize()",
        operation));
  }
  if (tensor.device().is_cpu() && tensor.layout() == at::kStrided) return;
  throw UsageError(
      fmt::format("{} of a {} tensor on {}: the backend paceline takes dense tensors on the CPU",
                  operation, c10::str(tensor.layout()), tensor.device().str()));
}

const at::Tensor& single(const Tensors& tensors, const char* operation) {
  if (tensors.size() != 1) {
    throw UsageError(
        fmt::format("{} of {} tensors at once: one is expected", operation, tensors.size()));
  }
  check_dense(tensors.front(), operation);
  return tensors.front();
}

const Tensors& single_list(const std::vector<Tensors>& lists, const at::Tensor& like, int size,
                           const char* operation) {
  if (lists.size() != 1) {
    throw UsageError(
        fmt::format("{} with {} lists of tensors: one is expected", operation, lists.size()));
  }
  check_list(lists.front(), like, size, operation);
  return lists.front();
}

void check_list(const Tensors& list, const at::Tensor& like, int size, const char* operation) {
  if (list.size() != static_cast<std::size_t>(size)) {
    throw UsageError(
        fmt::format("{} with {} tensors in a group of {} ranks: one for each rank is expected",
                    operation, list.size(), size));
  }
  for (const at::Tensor& part : list) {
    check_dense(part, operation);
    check_same_type(part, like, operation);
  }
}

void check_same_type(const at::Tensor& a, const at::Tensor& b, const char* operation) {
  if (a.scalar_type() == b.scalar_type()) return;
  throw UsageError(fmt::format("{}: a tensor of {} beside one of {}; all must have the same type",
                               operation, describe(a), describe(b)));
}

void check_same_size(const Tensors& parts, const at::Tensor& like, const char* operation) {
  for (const at::Tensor& part : parts) {
    if (part.numel() == like.numel()) continue;
    throw UsageError(fmt::format("{}: a tensor of {} beside one of {}; all must have the same size",
                                 operation, describe(part), describe(like)));
  }
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* operation) {
  if (outputs.size() == inputs.size() && !inputs.empty()) return;
  throw UsageError(
      fmt::format("{} with {} outputs and {} inputs", operation, outputs.size(), inputs.size()));
}

void check_concatenation(const at::Tensor& whole, const at::Tensor& part, int size,
                         const char* operation) {
  check_dense(whole, operation);
  check_dense(part, operation);
  if (whole.numel() == size * part.numel() && whole.scalar_type() == part.scalar_type()) return;
  throw UsageError(fmt::format("{}: a tensor of {} is not made up of {} tensors of {}", operation,
                               describe(whole), size, describe(part)));
}

ByteLayout byte_layout(const at::Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  const shm::DataType type = distributed::moved_type_of(tensor.scalar_type());
  return {type == shm::DataType::byte ? count * tensor.element_size() : count, type};
}

Flat::Flat(const at::Tensor& tensor, Use use) : tensor_(tensor), layout_(byte_layout(tensor)) {
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    dense_ = tensor;
  } else if (use == Use::out) {
    dense_ = at::empty(tensor.sizes(), tensor.options());
  } else {
    dense_ = tensor.detach().resolve_conj().resolve_neg().contiguous();
  }
}

void Flat::write_back() const {
  if (!dense_.is_same(tensor_)) tensor_.detach().copy_(dense_);
}

Parts::Parts(const Tensors& tensors, Flat::Use use) {
  for (const at::Tensor& tensor : tensors) {
    flats_.emplace_back(tensor, use);
    add(flats_.back().data(), flats_.back().count());
  }
}

Parts::Parts(const at::Tensor& tensor, const std::vector<std::int64_t>& counts, Flat::Use use) {
  flats_.emplace_back(tensor, use);
  auto* data = static_cast<std::byte*>(flats_.front().data());
  const std::size_t element = shm::element_size(type());
  const std::size_t scale = tensor.element_size() / element;
  for (const std::int64_t count : counts) {
    add(data, static_cast<std::size_t>(count) * scale);
    data += static_cast<std::size_t>(count) * scale * element;
  }
}

Parts::Parts(const at::Tensor& tensor, int parts, Flat::Use use)
    : Parts(tensor,
            std::vector<std::int64_t>(static_cast<std::size_t>(parts), tensor.numel() / parts),
            use) {}

void Parts::add(void* data, std::size_t count) {
  inputs_.push_back({data, count});
  outputs_.push_back({data, count});
}

void Parts::write_back() const {
  for (const Flat& flat : flats_) flat.write_back();
}

std::vector<std::int64_t> split_counts(const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& splits, int size,
                                       const char* operation) {
  check_dense(tensor, operation);
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    if (rows % size != 0) {
      throw UsageError(fmt::format("{}: {} rows cannot be divided equally among {} ranks",
                                   operation, rows, size));
    }
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), rows / size * row);
  }
  const auto sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  const bool negative = std::any_of(splits.begin(), splits.end(), [](auto n) { return n < 0; });
  if (splits.size() != static_cast<std::size_t>(size) || sum != rows || negative) {
    throw UsageError(fmt::format("{}: splits {} do not divide {} rows among {} ranks", operation,
                                 fmt::join(splits, ", "), rows, size));
  }
  std::vector<std::int64_t> counts;
  for (const std::int64_t split : splits) counts.push_back(split * row);
  return counts;
}

}  // namespace paceline::backends
