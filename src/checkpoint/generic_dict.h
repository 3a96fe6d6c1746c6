#pragma once

#include <ATen/core/ivalue.h>

namespace paceline::checkpoint {

// A dict of any keys and values.
using GenericDict = c10::impl::GenericDict;

inline GenericDict empty_dict() {
  return GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

}  // namespace paceline::checkpoint
