#include <paceline/token_dataset.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <array>
#include <memory>

#include "base/mapped_file.h"
#include "data/check_index.h"

namespace paceline::data {
namespace {

std::int64_t token_size_of(at::ScalarType type) {
  if (type == at::kUInt16) return 2;
  if (type == at::kUInt32) return 4;
  throw UsageError(
      fmt::format("TokenDataset: dtype is {}; it must be UInt16 or UInt32", c10::toString(type)));
}

std::int64_t positive(const char* name, std::int64_t value) {
  if (value >= 1) return value;
  throw UsageError(fmt::format("TokenDataset: {} is {}; it must be at least 1", name, value));
}

// Independent of this machine's byte order.
template <std::int64_t kTokenSize>
void read_tokens(const std::uint8_t* from, std::int64_t* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i, from += kTokenSize) {
    std::uint32_t token = 0;
    for (unsigned byte = 0; byte < kTokenSize; ++byte)
      token |= std::uint32_t{from[byte]} << 8 * byte;
    to[i] = token;
  }
}

}  // namespace

TokenDataset::TokenDataset(const std::filesystem::path& path, const TokenDatasetOptions& options)
    : token_size_(token_size_of(options.dtype)),
      block_size_(positive("block_size", options.block_size)),
      stride_(positive("stride", options.stride.value_or(options.block_size))) {
  auto file = std::make_shared<base::MappedFile>(path);
  const auto size = static_cast<std::int64_t>(file->content().size());
  if (size % token_size_ != 0) {
    throw CorruptFile(
        fmt::format("{}: the last token is incomplete: tokens have {} bytes, and the "
                    "file has {} (at byte {})",
                    path.string(), token_size_, size, size - size % token_size_));
  }
  const std::int64_t count = size / token_size_;
  if (count - 1 < block_size_) {
    throw UsageError(
        fmt::format("TokenDataset: {} has {} tokens, and a sample of block_size {} "
                    "needs one more than {}",
                    path.string(), count, block_size_, block_size_));
  }
  size_ = (count - 1 - block_size_) / stride_ + 1;
  bytes_ = at::from_blob(
      file->data(), {size}, [file](void*) {},  // the tensor keeps it mapped
      at::TensorOptions(at::kByte));
}

TokenDataset::Sample TokenDataset::get(std::int64_t index) const {
  const Batch batch = get_batch(std::array{index});
  return {batch.first[0], batch.second[0]};
}

TokenDataset::Batch TokenDataset::get_batch(std::span<const std::int64_t> indices) const {
  const std::int64_t shape[] = {static_cast<std::int64_t>(indices.size()), block_size_};
  Batch batch(at::empty(shape, at::TensorOptions(at::kLong)),
              at::empty(shape, at::TensorOptions(at::kLong)));
  auto* x = batch.first.mutable_data_ptr<std::int64_t>();
  auto* y = batch.second.mutable_data_ptr<std::int64_t>();
  const auto read = token_size_ == 2 ? read_tokens<2> : read_tokens<4>;
  for (const std::int64_t index : indices) {
    check_index("TokenDataset", index, size());
    const auto* const begin = bytes_.const_data_ptr<std::uint8_t>() + index * stride_ * token_size_;
    read(begin, x, block_size_);
    read(begin + token_size_, y, block_size_);
    x += block_size_;
    y += block_size_;
  }
  return batch;
}

}  // namespace paceline::data
