#include <paceline/data_loader.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <exception>
#include <string>

#include "distributed/translate.h"

namespace paceline::data::detail {
namespace {

void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw UsageError(fmt::format("DataLoader: {} is {}; it must be at least {}", name, value, least));
}

std::string describe(std::span<const std::int64_t> indices) {
  constexpr std::size_t kShown = 8;
  const auto shown = indices.first(std::min(indices.size(), kShown));
  return fmt::format("{} {}{}", indices.size() == 1 ? "sample" : "a batch of the samples",
                     fmt::join(shown, ", "), shown.size() < indices.size() ? ", ..." : "");
}

}  // namespace

void check_options(const DataLoaderOptions& options) {
  check_at_least("batch_size", options.batch_size, 1);
  check_at_least("num_workers", options.num_workers, 0);
  check_at_least("prefetch_factor", options.prefetch_factor, 1);
}

std::int64_t count_batches(std::int64_t samples, const DataLoaderOptions& options) {
  const std::int64_t full = samples / options.batch_size;
  return options.drop_last || samples % options.batch_size == 0 ? full : full + 1;
}

Batches make_batches(const std::vector<std::int64_t>& indices, const DataLoaderOptions& options) {
  Batches batches(
      static_cast<std::size_t>(count_batches(static_cast<std::int64_t>(indices.size()), options)));
  const auto size = static_cast<std::size_t>(options.batch_size);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto batch = std::span(indices).subspan(i * size);
    const auto end = batch.begin() + static_cast<std::ptrdiff_t>(std::min(size, batch.size()));
    batches[i].assign(batch.begin(), end);
  }
  return batches;
}

void throw_sample_error(Indices indices) {
  std::throw_with_nested(Error(
      fmt::format("DataLoader: {}: {}", describe(indices), distributed::current_exception_text())));
}

at::IValue value_of(const EpochPosition& position) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert("epoch", position.epoch);
  dict.insert("samples", position.samples);
  return dict;
}

EpochPosition position_of(const at::IValue& value) {
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  const auto number = [&](const char* name) {
    if (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      const auto found = dict.find(name);
      if (found != dict.end() && found->value().isInt() && found->value().toInt() >= 0 &&
          found->value().toInt() < kMost) {
        return found->value().toInt();
      }
    }
    throw UsageError(
        fmt::format("DataLoader: this is no state of a loader: it has no number '{}'", name));
  };
  return {number("epoch"), number("samples")};
}

}  // namespace paceline::data::detail
