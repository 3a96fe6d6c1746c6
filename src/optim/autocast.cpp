#include <paceline/autocast.h>

#include <ATen/autocast_mode.h>
#include <fmt/format.h>

#include <paceline/error.h>

namespace paceline {
namespace {

c10::DeviceType checked_device_type(c10::DeviceType device_type) {
  if (at::autocast::is_autocast_available(device_type)) return device_type;
  throw UsageError(fmt::format("autocast: LibTorch has none for the device type {}; use at::kCPU",
                               c10::DeviceTypeName(device_type, true)));
}

}  // namespace

autocast::autocast(c10::DeviceType device_type, const AutocastOptions& options)
    : device_type_(checked_device_type(device_type)),
      previous_enabled_(at::autocast::is_autocast_enabled(device_type)),
      previous_dtype_(at::autocast::get_autocast_dtype(device_type)),
      previous_cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  const c10::ScalarType dtype = options.dtype.value_or(previous_dtype_);
  if (options.enabled && dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw UsageError(fmt::format("autocast: dtype is {}; it must be at::kBFloat16 or at::kHalf",
                                 c10::toString(dtype)));
  }
  at::autocast::set_autocast_enabled(device_type_, options.enabled);
  at::autocast::set_autocast_dtype(device_type_, dtype);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(options.cache_enabled.value_or(previous_cache_enabled_));
}

autocast::~autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_type_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_enabled_);
}

}  // namespace paceline
