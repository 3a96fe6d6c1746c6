#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/pickle.h"
#include "checkpoint/pickled_tensor.h"

namespace {

using paceline::checkpoint::PickleValue;

// Recursion is what the parser allows.
void visit(const PickleValue& value, int& budget) {
  if (--budget < 0) return;
  if (const auto tensor = paceline::checkpoint::tensor_of(value, "fuzz")) {
    std::uint64_t last = static_cast<std::uint64_t>(tensor->offset);
    for (std::size_t i = 0; i < tensor->sizes.size(); ++i) {
      if (tensor->sizes[i] == 0) return;
      last += static_cast<std::uint64_t>(tensor->sizes[i] - 1) *
              static_cast<std::uint64_t>(tensor->strides[i]);
    }
    if (last >= tensor->storage_size) std::abort();
    return;
  }
  if (value.arguments) visit(*value.arguments, budget);
  for (const auto* const one : value.elements) visit(*one, budget);
  for (const auto* const one : value.appended) visit(*one, budget);
  for (const auto& [key, stored] : value.items) {
    visit(*key, budget);
    visit(*stored, budget);
  }
  if (value.state) visit(*value.state, budget);
}

}  // namespace

// Any bytes give values whose tensors are within their storages, or an error.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  try {
    const auto pickle =
        paceline::checkpoint::parse_pickle({reinterpret_cast<const char*>(bytes), size}, "fuzz");
    int budget = 10'000;
    visit(*pickle.root, budget);
  } catch (const paceline::Error&) {  // as it should be
  }
  return 0;
}
