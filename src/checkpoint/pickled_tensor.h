#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/pickle.h"

namespace paceline::checkpoint {

// A tensor as torch.save pickles it: torch/_tensor.py, _reduce_ex_internal. All in elements.
struct PickledTensor {
  std::string dtype;    // "float32"
  std::string storage;  // the name of its data in the file: "0"
  std::uint64_t storage_size = 0;
  std::string location;  // the device that it was on: "cpu", "cuda:0"
  std::int64_t offset = 0;
  std::vector<std::int64_t> sizes{};
  std::vector<std::int64_t> strides{};
  bool requires_grad = false;
  // Views that negate or conjugate what the storage contains.
  bool is_negative = false;
  bool is_conjugate = false;
};

// Of one element: of "float32", ...; 0 for other texts.
int bytes_of(std::string_view dtype);

// The dtype of a value that is one: "float32" of torch.float32.
std::optional<std::string> dtype_of(const PickleValue& value);

// None if the value is no tensor. The tensor is within its storage. Throws CorruptFile, which names
// the file `name`, if the tensor is malformed, and UsageError if it is sparse, quantized, or of
// another kind without a storage.
std::optional<PickledTensor> tensor_of(const PickleValue& value, const std::string& name);

// Adds the tensor; tensor_of gives it back.
const PickleValue& add_tensor(Pickle& pickle, const PickledTensor& tensor);

}  // namespace paceline::checkpoint
