#include "checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "checkpoint/file_writer.h"
#include "checkpoint/safetensors_header.h"
#include "checkpoint/torch_file.h"

namespace paceline::checkpoint {
namespace {

// Float4_e2m1fn_x2 has two of the format's elements in one.
constexpr std::array<std::pair<const char*, at::ScalarType>, 20> kTypes{{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F4", at::kFloat4_e2m1fn_x2},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"C64", at::kComplexFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
}};

std::string dtype_of(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw UsageError(fmt::format("save: tensor {} is undefined", name));
  const auto found = std::ranges::find(kTypes, tensor.scalar_type(),
                                       &std::pair<const char*, at::ScalarType>::second);
  if (tensor.layout() != at::kStrided || tensor.is_meta() || found == kTypes.end()) {
    throw UsageError(
        fmt::format("save: tensor {} is {} {} on {}: a safetensors file contains dense tensors of "
                    "integers, bool, float, float8 and complex64",
                    name, tensor.layout() == at::kStrided ? "dense" : "not dense",
                    c10::toString(tensor.scalar_type()), tensor.device().str()));
  }
  return found->first;
}

SafetensorsEntry describe(const std::string& name, const at::Tensor& tensor) {
  if (name == "__metadata__") throw UsageError("save: no tensor can have the name __metadata__");
  SafetensorsEntry entry{name, dtype_of(name, tensor), tensor.sizes().vec(), 0, tensor.nbytes()};
  if (entry.dtype == "F4") {
    if (entry.shape.empty())
      throw UsageError(fmt::format("save: tensor {} needs a dimension", name));
    entry.shape.back() *= 2;
  }
  return entry;
}

bool is_same(const at::Tensor& one, const at::Tensor& other) {
  return one.numel() > 0 && one.is_alias_of(other) &&
         one.const_data_ptr() == other.const_data_ptr() &&
         one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.is_conj() == other.is_conj() &&
         one.is_neg() == other.is_neg();
}

at::Tensor make_tensor(const SafetensorsEntry& entry, const std::shared_ptr<base::MappedFile>& file,
                       const std::filesystem::path& path) {
  const auto* const found =
      std::ranges::find(kTypes, entry.dtype, &std::pair<const char*, at::ScalarType>::first);
  auto shape = entry.shape;
  const bool is_odd = entry.dtype == "F4" && (shape.empty() || shape.back() % 2 != 0);
  if (found == kTypes.end() || is_odd) {
    throw UsageError(fmt::format("{}: tensor '{}' is {}, which LibTorch does not have",
                                 path.string(), entry.name,
                                 is_odd ? "an odd number of F4" : entry.dtype));
  }
  if (entry.dtype == "F4") shape.back() /= 2;
  const auto options = at::TensorOptions(found->second);
  char* const data = file->data() + entry.begin;
  if (entry.begin % c10::elementSize(found->second) == 0) {
    return at::from_blob(
        data, shape, [file](void*) {}, options);  // the tensor keeps it alive
  }
  at::Tensor tensor = at::empty(shape, options);
  std::memcpy(tensor.mutable_data_ptr(), data, entry.size);
  return tensor;
}

}  // namespace

void write_safetensors(const StateDict& state, const std::filesystem::path& path,
                       const SaveOptions& options) {
  std::vector<std::pair<SafetensorsEntry, at::Tensor>> tensors;
  auto metadata = options.metadata;
  // By storage: to compare each tensor with all others would take long.
  std::multimap<const void*, std::string> names;
  for (const auto& one : state) {
    auto entry = describe(one.key(), one.value());
    const auto [begin, end] = names.equal_range(one.value().storage().unsafeGetStorageImpl());
    const auto same = std::find_if(
        begin, end, [&](const auto& other) { return is_same(one.value(), state[other.second]); });
    if (same != end) {
      metadata[one.key()] = same->second;
      continue;
    }
    names.emplace(one.value().storage().unsafeGetStorageImpl(), one.key());
    tensors.emplace_back(std::move(entry), one.value());
  }
  // The larger elements first: then all are aligned.
  std::ranges::stable_sort(tensors, std::ranges::greater(),
                           [](const auto& one) { return bits_of(one.first.dtype); });
  SafetensorsHeader header{{}, std::move(metadata)};
  for (const auto& [entry, tensor] : tensors) header.tensors.push_back(entry);
  FileWriter file(path, {.fsync = options.fsync});
  file.write(make_safetensors_header(header));
  for (const auto& [entry, tensor] : tensors) {
    const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
    file.write({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()});
  }
  file.commit();
}

StateDict read_safetensors(const std::shared_ptr<base::MappedFile>& file,
                           const std::filesystem::path& path, c10::Device device) {
  check_device(device);
  const auto header = parse_safetensors_header(file->content(), path.string());
  StateDict state;
  for (const SafetensorsEntry& entry : header.tensors) {
    try {
      state.insert(entry.name, make_tensor(entry, file, path).to(device));
    } catch (const c10::Error& error) {
      throw CorruptFile(fmt::format("{}: tensor '{}': {}", path.string(), entry.name, error.msg()));
    }
  }
  // The package leaves out the other names of a tensor that has several, and notes them here.
  for (const auto& [name, kept] : header.metadata) {
    if (!state.contains(name) && state.contains(kept)) state.insert(name, at::Tensor(state[kept]));
  }
  return state;
}

}  // namespace paceline::checkpoint
