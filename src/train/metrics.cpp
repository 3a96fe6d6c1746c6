#include <paceline/metrics.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <limits>
#include <nlohmann/json.hpp>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "parallel/with_error_context.h"
#include "train/exact_sum.h"

namespace paceline {
namespace {

using nlohmann::json;

std::vector<std::int64_t> numbers_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  const auto* const begin = flat.const_data_ptr<std::int64_t>();
  return {begin, begin + flat.numel()};
}

bool has_classes(const at::Tensor& tensor, std::int64_t classes) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) &&
         (tensor.numel() == 0 ||
          (tensor.min().item<std::int64_t>() >= 0 && tensor.max().item<std::int64_t>() < classes));
}

// `none` if there are no values at all.
template <typename T>
T find(const std::map<std::string, T>& values, const char* kind, const std::string& name, T none) {
  const auto found = values.find(name);
  if (found != values.end()) return found->second;
  if (values.empty()) return none;
  std::vector<std::string> names;
  for (const auto& one : values) names.push_back(one.first);
  throw UsageError(
      fmt::format("Metrics: there is no {} '{}', but {}", kind, name, fmt::join(names, ", ")));
}

void add_count(const std::string& name, std::int64_t& sum, std::int64_t count) {
  std::int64_t larger = 0;
  if (__builtin_add_overflow(sum, count, &larger)) {
    throw UsageError(fmt::format("Metrics: the count of '{}' does not fit in 64 bits", name));
  }
  sum = larger;
}

}  // namespace

void Metrics::add(const std::string& name, double value, std::int64_t count) {
  if (count < 0) {
    throw UsageError(
        fmt::format("Metrics::add: '{}' has a count of {}; it must not be negative", name, count));
  }
  Mean& mean = means_[name];
  add_count(name, mean.count, count);
  if (count > 0) train::add_exactly(mean.sum, value * static_cast<double>(count));
}

void Metrics::add(const std::string& name, const at::Tensor& value, std::int64_t count) {
  if (!value.defined() || value.numel() != 1) {
    throw UsageError(fmt::format("Metrics::add: the tensor of '{}' must have one element", name));
  }
  add(name, value.item<double>(), count);
}

void Metrics::add_confusion(const std::string& name, const at::Tensor& predictions,
                            const at::Tensor& targets, std::int64_t classes) {
  if (classes < 1 || predictions.sizes() != targets.sizes() || !has_classes(predictions, classes) ||
      !has_classes(targets, classes)) {
    throw UsageError(fmt::format(
        "Metrics::add_confusion: '{}' needs predictions and targets of one shape, integers from 0 "
        "to classes - 1 = {}",
        name, classes - 1));
  }
  const at::Tensor cells =
      targets.flatten().to(at::kLong) * classes + predictions.flatten().to(at::kLong);
  const at::Tensor counts =
      at::bincount(cells.cpu(), {}, classes * classes).reshape({classes, classes});
  at::Tensor& sum = confusions_[name];
  if (sum.defined() && sum.size(0) != classes) {
    throw UsageError(fmt::format("Metrics::add_confusion: '{}' has {} classes now, and had {}",
                                 name, classes, sum.size(0)));
  }
  sum = sum.defined() ? sum + counts : counts;
}

double Metrics::Values::mean(const std::string& name) const {
  return find(means, "mean", name, std::numeric_limits<double>::quiet_NaN());
}

at::Tensor Metrics::Values::confusion(const std::string& name, std::int64_t classes) const {
  return find(confusions, "confusion", name, at::zeros({classes, classes}, at::kLong));
}

Metrics::Values Metrics::reduce() {
  json own{{"means", json::object()}, {"confusions", json::object()}};
  for (const auto& [name, mean] : means_) {
    std::vector<std::uint64_t> bits;  // JSON has no NaN
    for (const double partial : mean.sum) bits.push_back(std::bit_cast<std::uint64_t>(partial));
    own["means"][name] = {mean.count, bits};
  }
  for (const auto& [name, counts] : confusions_) {
    own["confusions"][name] = {counts.size(0), numbers_of(counts)};
  }
  means_.clear();
  confusions_.clear();
  std::map<std::string, Mean> means;
  Values values;
  // What is no UTF-8 in a name must not throw on this rank alone.
  const auto all = parallel::with_error_context(
      "adding up; call reduce() on all ranks",
      [&] {
        return all_gather_bytes(own.dump(-1, ' ', false, json::error_handler_t::replace),
                                {.group = group_});
      },
      "Metrics");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const json other = json::parse(all[rank]);
    for (const auto& [name, mean] : other.at("means").items()) {
      add_count(name, means[name].count, mean.at(0).get<std::int64_t>());
      for (const auto& bits : mean.at(1)) {
        train::add_exactly(means[name].sum, std::bit_cast<double>(bits.get<std::uint64_t>()));
      }
    }
    for (const auto& [name, confusion] : other.at("confusions").items()) {
      const auto classes = confusion.at(0).get<std::int64_t>();
      const auto counts = at::tensor(confusion.at(1).get<std::vector<std::int64_t>>(), at::kLong)
                              .reshape({classes, classes});
      at::Tensor& sum = values.confusions[name];
      if (sum.defined() && sum.sizes() != counts.sizes()) {
        throw UsageError(fmt::format(
            "Metrics::reduce: '{}' has {} classes on rank {} of the group, and {} on another", name,
            classes, rank, sum.size(0)));
      }
      sum = sum.defined() ? sum + counts : counts;
    }
  }
  for (const auto& [name, mean] : means) {
    values.means[name] = mean.count == 0
                             ? std::numeric_limits<double>::quiet_NaN()
                             : train::round_sum(mean.sum) / static_cast<double>(mean.count);
  }
  return values;
}

}  // namespace paceline
