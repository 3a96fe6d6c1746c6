#include <paceline/data_loader.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <exception>
#include <string>

#include "base/hash.h"
#include "base/log.h"
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
  check_at_least("timeout", options.timeout.count(), 0);
  if (options.timeout.count() > 0 && options.num_workers == 0) {
    throw UsageError("DataLoader: timeout needs num_workers: without them, no thread can wait");
  }
  check_at_least("prefetch_factor", options.prefetch_factor.value_or(1), 1);
  if (options.prefetch_factor && options.num_workers == 0) {
    throw UsageError(
        "DataLoader: prefetch_factor needs num_workers: without them, nothing is "
        "fetched ahead");
  }
}

bool pins_memory(const DataLoaderOptions& options) {
  if (options.pin_memory && !at::globalContext().hasCUDA()) {
    base::log(LogLevel::warning,
              "DataLoader: pin_memory is set, but there is no CUDA: batches are not pinned");
    return false;
  }
  return options.pin_memory;
}

// Not by set_data: the data set may have the same tensor, and put it into other batches, too.
void pin(const at::Tensor& tensor) {
  if (tensor.is_cpu() && !tensor.is_pinned()) {
    const_cast<at::Tensor&>(tensor) = tensor.pin_memory();
  }
}

void check_options_beside_batch_sampler(const DataLoaderOptions& options) {
  if (options.batch_size == 1 && !options.drop_last) return;
  throw UsageError(
      "DataLoader: batch_size and drop_last are options of the batch sampler; do not set them in "
      "DataLoaderOptions");
}

at::Generator make_generator() {
  return at::detail::createCPUGenerator();
}

void seed_for_sample(at::Generator& generator, std::uint64_t seed, std::int64_t epoch,
                     std::int64_t index) {
  std::uint64_t hash = base::splitmix(seed);
  for (const std::int64_t part : {epoch, index}) {
    hash = base::splitmix(hash + static_cast<std::uint64_t>(part));
  }
  generator.set_current_seed(hash);
}

void throw_sample_error(Indices indices) {
  std::throw_with_nested(Error(
      fmt::format("DataLoader: {}: {}", describe(indices), distributed::current_exception_text())));
}

void throw_timeout(Indices indices, std::chrono::milliseconds timeout) {
  throw Error(fmt::format("DataLoader: {} was not ready within the timeout of {} s",
                          describe(indices), static_cast<double>(timeout.count()) / 1e3));
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
