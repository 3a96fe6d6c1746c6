#include <paceline/subset.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "data/check_index.h"

namespace paceline::data::detail {
namespace {

[[noreturn]] void throw_bad_split(const std::string& lengths, const std::string& problem) {
  throw UsageError(fmt::format("random_split: {} {}", lengths, problem));
}

std::vector<std::int64_t> lengths_of(std::int64_t size, std::span<const double> fractions) {
  std::vector<std::int64_t> lengths;
  for (const double fraction : fractions) {
    if (!(fraction >= 0 && fraction <= 1)) {
      throw_bad_split(fmt::format("the fraction {}", fraction), "is not from 0 to 1");
    }
    lengths.push_back(static_cast<std::int64_t>(std::floor(static_cast<double>(size) * fraction)));
  }
  // As in PyTorch, but for the rounding of a sum above 1, which is too small to add a sample.
  const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  if (sum < 1 - 1e-9 || sum > 1 + 4 * std::numeric_limits<double>::epsilon()) {
    throw_bad_split(fmt::format("the fractions {}", fmt::join(fractions, ", ")),
                    "do not add up to 1");
  }
  std::int64_t rest = size - std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  for (std::size_t i = 0; rest > 0; ++i, --rest) ++lengths[i % lengths.size()];
  return lengths;
}

}  // namespace

void check_indices(std::span<const std::int64_t> indices, std::int64_t size) {
  for (const std::int64_t index : indices) check_index("Subset: the data set", index, size);
}

std::int64_t index_at(std::span<const std::int64_t> indices, std::int64_t index) {
  check_index("Subset", index, std::ssize(indices));
  return indices[static_cast<std::size_t>(index)];
}

std::vector<std::int64_t> indices_at(std::span<const std::int64_t> indices,
                                     std::span<const std::int64_t> positions) {
  std::vector<std::int64_t> found;
  found.reserve(positions.size());
  for (const std::int64_t position : positions) found.push_back(index_at(indices, position));
  return found;
}

std::vector<std::vector<std::int64_t>> split_indices(std::int64_t size,
                                                     std::span<const std::int64_t> lengths,
                                                     std::uint64_t seed) {
  std::int64_t rest = size;
  bool fit = true;
  for (const std::int64_t length : lengths) {
    fit = fit && length >= 0 && length <= rest;
    if (fit) rest -= length;
  }
  if (!fit || rest != 0) {
    throw_bad_split(fmt::format("the lengths {}", fmt::join(lengths, ", ")),
                    fmt::format("do not add up to the data set's size, {}", size));
  }
  // The call that Python's random_split makes, so the indices are equal.
  const at::Tensor order =
      at::randperm(size, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
  const auto* next = order.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> parts;
  for (const std::int64_t length : lengths) {
    parts.emplace_back(next, next + length);
    next += length;
  }
  return parts;
}

std::vector<std::vector<std::int64_t>> split_indices(std::int64_t size,
                                                     std::span<const double> fractions,
                                                     std::uint64_t seed) {
  return split_indices(size, lengths_of(size, fractions), seed);
}

void check_concat_index(std::int64_t index, std::int64_t size) {
  check_index("ConcatDataset", index, size);
}

}  // namespace paceline::data::detail
