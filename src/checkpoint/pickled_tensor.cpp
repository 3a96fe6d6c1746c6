#include "checkpoint/pickled_tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using Kind = PickleValue::Kind;

// The types without a storage class of their own have UntypedStorage, which counts bytes.
struct DtypeInfo {
  std::string_view dtype;
  int bytes;
  std::string_view storage = {};
};
constexpr std::array<DtypeInfo, 22> kDtypes{{
    {"bool", 1, "BoolStorage"},
    {"uint8", 1, "ByteStorage"},
    {"int8", 1, "CharStorage"},
    {"int16", 2, "ShortStorage"},
    {"int32", 4, "IntStorage"},
    {"int64", 8, "LongStorage"},
    {"float16", 2, "HalfStorage"},
    {"bfloat16", 2, "BFloat16Storage"},
    {"float32", 4, "FloatStorage"},
    {"float64", 8, "DoubleStorage"},
    {"complex64", 8, "ComplexFloatStorage"},
    {"complex128", 16, "ComplexDoubleStorage"},
    {"complex32", 4},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float8_e4m3fn", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"float4_e2m1fn_x2", 1},
}};
constexpr std::string_view kUntyped = "torch.storage.UntypedStorage";

const DtypeInfo* find_dtype(std::string_view DtypeInfo::*member, std::string_view text) {
  const auto* const found = std::ranges::find(kDtypes, text, member);
  return found == kDtypes.end() || text.empty() ? nullptr : found;
}

class TensorReader {
 public:
  using Arguments = std::vector<const PickleValue*>;

  explicit TensorReader(const std::string& name) : name_(name) {}

  std::optional<PickledTensor> read(const PickleValue& value) const {
    if (value.kind != Kind::call) return std::nullopt;
    const std::string& function = value.callee->text;
    const Arguments& arguments = value.arguments->elements;
    if (auto tensor = rebuild(function, arguments)) return tensor;
    if (function == "torch._utils._rebuild_parameter" ||
        function == "torch._utils._rebuild_parameter_with_state") {
      return rebuild_parameter(arguments);
    }
    if (function == "torch._tensor._rebuild_from_type_v2") return rebuild_from_type(arguments);
    if (function.starts_with("torch._utils._rebuild_")) {
      throw UsageError(fmt::format("{}: a tensor is made by {}; Paceline reads dense tensors only",
                                   name_, function));
    }
    return std::nullopt;
  }

 private:
  // (storage, offset, size, stride, requires_grad, hooks[, dtype][, metadata]). None for another
  // function.
  std::optional<PickledTensor> rebuild(const std::string& function,
                                       const Arguments& arguments) const {
    const bool has_dtype = function == "torch._utils._rebuild_tensor_v3";
    if (!has_dtype && function != "torch._utils._rebuild_tensor_v2") return std::nullopt;
    const std::size_t count = has_dtype ? 7 : 6;
    need(arguments.size() >= count, "too few arguments");
    PickledTensor tensor;
    const DtypeInfo* type = read_storage(*arguments[0], tensor);
    if (has_dtype) {
      need(type == nullptr, "a dtype and a storage of another");
      const PickleValue& dtype = *arguments[6];
      type = find_dtype(&DtypeInfo::dtype, dtype_of(dtype).value_or(""));
      if (type == nullptr && dtype.kind == Kind::global && dtype.text.starts_with("torch.")) {
        throw UsageError(fmt::format("{}: a tensor has the dtype {}, which Paceline does not read",
                                     name_, dtype.text));
      }
      need(type != nullptr, "no dtype");
      tensor.storage_size /= static_cast<std::uint64_t>(type->bytes);
    }
    need(type != nullptr, "no dtype");
    tensor.dtype = type->dtype;
    tensor.offset = integer(*arguments[1]);
    tensor.sizes = integers(*arguments[2]);
    tensor.strides = integers(*arguments[3]);
    tensor.requires_grad = boolean(*arguments[4]);
    if (arguments.size() > count) read_metadata(*arguments[count], tensor);
    check_bounds(tensor);
    return tensor;
  }

  // (tensor, requires_grad, hooks[, state])
  PickledTensor rebuild_parameter(const Arguments& arguments) const {
    need(arguments.size() >= 3 && arguments[0]->kind == Kind::call, "too few arguments");
    auto tensor = rebuild(arguments[0]->callee->text, arguments[0]->arguments->elements);
    need(tensor.has_value(), "no data");
    tensor->requires_grad = boolean(*arguments[1]);
    return *std::move(tensor);
  }

  // (function, type, arguments, state): a tensor with attributes, or a subclass.
  PickledTensor rebuild_from_type(const Arguments& arguments) const {
    need(arguments.size() == 4 && arguments[2]->kind == Kind::tuple, "too few arguments");
    const std::string& type = arguments[1]->text;
    if (type == "torch.Tensor" || type == "torch.nn.parameter.Parameter") {
      if (auto tensor = rebuild(arguments[0]->text, arguments[2]->elements)) {
        return *std::move(tensor);
      }
    }
    throw UsageError(
        fmt::format("{}: a tensor is a {}, made by {}; Paceline reads dense tensors only", name_,
                    type, arguments[0]->text));
  }

  // ('storage', class, key, location, size). Returns the class's type, null for UntypedStorage.
  const DtypeInfo* read_storage(const PickleValue& value, PickledTensor& tensor) const {
    need(value.kind == Kind::persistent && value.elements.front()->kind == Kind::tuple,
         "no storage");
    const auto& parts = value.elements.front()->elements;
    need(parts.size() == 5 && parts[0]->text == "storage" && parts[1]->kind == Kind::global &&
             parts[2]->kind == Kind::text && parts[3]->kind == Kind::text,
         "no storage");
    const std::string& name = parts[1]->text;
    tensor.storage = parts[2]->text;
    tensor.location = parts[3]->text;
    const std::int64_t size = integer(*parts[4]);
    need(size >= 0, "a storage of negative size");
    tensor.storage_size = static_cast<std::uint64_t>(size);
    if (name == kUntyped) return nullptr;
    constexpr std::string_view kModule = "torch.";
    const DtypeInfo* const type = name.starts_with(kModule)
                                      ? find_dtype(&DtypeInfo::storage, name.substr(kModule.size()))
                                      : nullptr;
    if (type == nullptr) {
      throw UsageError(
          fmt::format("{}: a tensor is in a {}; Paceline reads dense tensors only", name_, name));
    }
    return type;
  }

  void read_metadata(const PickleValue& value, PickledTensor& tensor) const {
    if (value.kind == Kind::none) return;
    need(value.kind == Kind::dict, "metadata that are no dict");
    for (const auto& [key, flag] : value.items) {
      if (key->text == "conj") tensor.is_conjugate = boolean(*flag);
      if (key->text == "neg") tensor.is_negative = boolean(*flag);
    }
  }

  void check_bounds(const PickledTensor& tensor) const {
    need(tensor.sizes.size() == tensor.strides.size() && tensor.offset >= 0,
         "sizes and strides that do not fit together");
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    std::uint64_t last = static_cast<std::uint64_t>(tensor.offset);
    std::uint64_t count = 1;
    bool fits = true;
    for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
      need(tensor.sizes[i] >= 0 && tensor.strides[i] >= 0, "a negative size or stride");
      const auto size = static_cast<std::uint64_t>(tensor.sizes[i]);
      const auto stride = static_cast<std::uint64_t>(tensor.strides[i]);
      std::uint64_t extent = 0;
      fits = fits && !__builtin_mul_overflow(size == 0 ? 0 : size - 1, stride, &extent) &&
             !__builtin_add_overflow(last, extent, &last) && last <= kMost;
      need(!__builtin_mul_overflow(count, std::max<std::uint64_t>(size, 1), &count) &&
               count <= kMost,
           "more than 2^63 elements");
    }
    const bool is_empty = std::ranges::find(tensor.sizes, 0) != tensor.sizes.end();
    need(is_empty || (fits && last < tensor.storage_size), "elements outside of its storage");
  }

  std::int64_t integer(const PickleValue& value) const {
    need(value.kind == Kind::integer, "no integer where one is needed");
    return value.integer;
  }
  bool boolean(const PickleValue& value) const {
    need(value.kind == Kind::boolean, "no boolean where one is needed");
    return value.boolean;
  }
  // Of a tuple, or of a torch.Size.
  std::vector<std::int64_t> integers(const PickleValue& value) const {
    const bool is_size = value.kind == Kind::call && value.callee->text == "torch.Size" &&
                         value.arguments->elements.size() == 1;
    const PickleValue& tuple = is_size ? *value.arguments->elements.front() : value;
    need(tuple.kind == Kind::tuple, "no tuple of integers where one is needed");
    std::vector<std::int64_t> all;
    for (const auto* const element : tuple.elements) all.push_back(integer(*element));
    return all;
  }
  void need(bool condition, const char* otherwise) const {
    if (!condition) throw CorruptFile(fmt::format("{}: a tensor has {}", name_, otherwise));
  }

  const std::string& name_;
};

}  // namespace

int bytes_of(std::string_view dtype) {
  const DtypeInfo* const type = find_dtype(&DtypeInfo::dtype, dtype);
  return type == nullptr ? 0 : type->bytes;
}

std::optional<std::string> dtype_of(const PickleValue& value) {
  constexpr std::string_view kModule = "torch.";
  if (value.kind != Kind::global || !value.text.starts_with(kModule)) return std::nullopt;
  const DtypeInfo* const type = find_dtype(&DtypeInfo::dtype, value.text.substr(kModule.size()));
  if (type == nullptr) return std::nullopt;
  return std::string(type->dtype);
}

std::optional<PickledTensor> tensor_of(const PickleValue& value, const std::string& name) {
  return TensorReader(name).read(value);
}

const PickleValue& add_tensor(Pickle& pickle, const PickledTensor& tensor) {
  const DtypeInfo& type = *find_dtype(&DtypeInfo::dtype, tensor.dtype);
  const bool is_typed = !type.storage.empty();
  const auto integers = [&](const std::vector<std::int64_t>& all) {
    std::vector<const PickleValue*> elements;
    for (const std::int64_t one : all) elements.push_back(&pickle.add_integer(one));
    return &pickle.add_sequence(Kind::tuple, std::move(elements));
  };
  const auto global = [&](std::string name) {
    return &pickle.add_text(Kind::global, std::move(name));
  };
  const std::uint64_t bytes_or_count =
      tensor.storage_size * static_cast<std::uint64_t>(is_typed ? 1 : type.bytes);
  const auto* const storage = &pickle.add_sequence(
      Kind::tuple,
      {&pickle.add_text(Kind::text, "storage"),
       global(is_typed ? fmt::format("torch.{}", type.storage) : std::string(kUntyped)),
       &pickle.add_text(Kind::text, tensor.storage), &pickle.add_text(Kind::text, tensor.location),
       &pickle.add_integer(static_cast<std::int64_t>(bytes_or_count))});
  std::vector<const PickleValue*> arguments{
      &pickle.add_sequence(Kind::persistent, {storage}),
      &pickle.add_integer(tensor.offset),
      integers(tensor.sizes),
      integers(tensor.strides),
      &pickle.add({.kind = Kind::boolean, .boolean = tensor.requires_grad}),
      &pickle.add_call(*global("collections.OrderedDict"), {}),  // hooks
  };
  if (!is_typed) arguments.push_back(global(fmt::format("torch.{}", type.dtype)));
  return pickle.add_call(*global(fmt::format("torch._utils._rebuild_tensor_v{}", is_typed ? 2 : 3)),
                         std::move(arguments));
}

}  // namespace paceline::checkpoint
