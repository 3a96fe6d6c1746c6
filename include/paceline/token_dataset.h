#pragma once

/// @file
/// Files of tokens, for language models.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>

#include <paceline/api.h>

namespace paceline::data {

/// Options of TokenDataset.
struct TokenDatasetOptions {
  /// Tokens in a sample, at least 1.
  std::int64_t block_size = 1024;
  /// Tokens from the beginning of one sample to that of the next, at least 1. Unset: block_size.
  std::optional<std::int64_t> stride = std::nullopt;
  /// The type of a token in the file: at::kUInt16 or at::kUInt32.
  at::ScalarType dtype = at::kUInt16;
};

/// A file of tokens one after the other, little-endian, without a header: what NumPy's tofile
/// writes, and nanoGPT's train.bin is.
///
/// A sample is a block of tokens and the same block shifted by one, which a language model
/// predicts:
///
///     x = tokens[i * stride, ..., i * stride + block_size - 1]
///     y = tokens[i * stride + 1, ..., i * stride + block_size]
///
/// both int64. Tokens at the end that do not fill a block are left out.
///
/// The file is mapped into memory, so only what is read of it is loaded. It must not become shorter
/// meanwhile: that would end the process by SIGBUS. Copies share the mapping. Safe to use from
/// several threads at once.
class PACELINE_API TokenDataset {
 public:
  /// A block and the one shifted by one.
  using Sample = std::pair<at::Tensor, at::Tensor>;
  /// Several of both.
  using Batch = std::pair<at::Tensor, at::Tensor>;

  /// Throws UsageError if an option is invalid or the file has no whole sample, CorruptFile if its
  /// last token is incomplete, and Error if it cannot be read.
  explicit TokenDataset(const std::filesystem::path& path, const TokenDatasetOptions& options = {});

  /// The number of samples.
  std::int64_t size() const { return size_; }
  /// The sample `index`, two tensors of shape (block_size). Throws UsageError unless 0 <= index <
  /// size().
  Sample get(std::int64_t index) const;
  /// The samples of n indices, of shape (n, block_size). Throws UsageError as get does.
  Batch get_batch(std::span<const std::int64_t> indices) const;
  /// The number of tokens in the file.
  std::int64_t tokens() const { return bytes_.numel() / token_size_; }

 private:
  at::Tensor bytes_;  // the file's
  std::int64_t token_size_;
  std::int64_t block_size_;
  std::int64_t stride_;
  std::int64_t size_ = 0;
};

}  // namespace paceline::data
