#pragma once

/// @file
/// Mixed precision: operations in 16 bits within a scope, as Python's torch.autocast.

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include <paceline/api.h>

namespace paceline {

/// Options of autocast.
struct AutocastOptions {
  /// The type of operations that gain from 16 bits: at::kBFloat16 or at::kHalf. Unset: the type of
  /// the scope around this one; outside of all scopes, bfloat16 on the CPU.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  /// Whether operations change their types. False ends that for a scope within another.
  bool enabled = true;
  /// Whether a parameter is converted once, and not at each use, until the outermost scope ends.
  /// Unset: as it is around this scope, true by default.
  std::optional<bool> cache_enabled = std::nullopt;
};

/// While it exists, LibTorch chooses the type of each operation of this thread, the same as in
/// Python: convolutions and products of matrices compute in 16 bits, most losses in float32.
/// Parameters and their gradients stay float32.
///
///     at::Tensor loss;
///     {
///       const paceline::autocast guard(at::kCPU);  // bfloat16
///       loss = cross_entropy(model(x), y);
///     }
///     loss.backward();
///
/// Run the forward and the loss in the scope, and the backward after it. The scopes of a thread
/// nest: end them on the same thread, in reverse order. In float16, small gradients become 0 unless
/// the loss is scaled up before backward, and gradients down before the optimizer's step.
class PACELINE_API autocast {
 public:
  /// Throws UsageError for a device without autocast, and for another type if `enabled`, where
  /// Python warns and turns it off.
  explicit autocast(c10::DeviceType device_type, const AutocastOptions& options = {});
  /// Restores what was before. The outermost scope also clears the cache.
  ~autocast();
  autocast(const autocast&) = delete;
  autocast& operator=(const autocast&) = delete;

 private:
  c10::DeviceType device_type_;
  bool previous_enabled_;
  c10::ScalarType previous_dtype_;
  bool previous_cache_enabled_;
};

}  // namespace paceline
