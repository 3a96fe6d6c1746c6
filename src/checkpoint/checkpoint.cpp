#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/mapped_file.h"
#include "checkpoint/agreement.h"
#include "checkpoint/file_writer.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/torch_file.h"
#include "distributed/process_state.h"
#include "parallel/with_error_context.h"

namespace paceline {
namespace {

using base::MappedFile;
using checkpoint::attempt;
using nlohmann::json;

bool is_torch_name(const std::filesystem::path& path) {
  return path.extension() == ".pt" || path.extension() == ".pth";
}

// Of one file with tensors.
StateDict load_file(const std::shared_ptr<MappedFile>& file, const std::filesystem::path& path,
                    c10::Device device) {
  if (!checkpoint::is_torch_file(file->content())) {
    try {
      return checkpoint::read_safetensors(file, path, device);
    } catch (const CorruptFile& error) {
      if (!is_torch_name(path)) throw;
      throw CorruptFile(fmt::format("{}; nor was it written by torch.save", error.what()));
    }
  }
  const at::IValue value =
      checkpoint::read_torch_file(file, path, device, checkpoint::StorageMemory::mapped);
  try {
    return state_dict(value);
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", path.string(), error.what()));
  }
}

// A safetensors file begins with the length of its header, whose first byte may be a brace, too.
bool is_index(std::string_view content) {
  constexpr std::size_t kLengthBytes = 8;
  const bool has_length = content.size() > kLengthBytes && content[kLengthBytes - 1] == '\0';
  return content.starts_with('{') && !has_length;
}

// The index of a sharded checkpoint: {"metadata": ..., "weight_map": {TENSOR: FILE, ...}}, with the
// names of files beside it.
StateDict load_shards(const MappedFile& file, const std::filesystem::path& path,
                      c10::Device device) {
  const json index = json::parse(file.content(), nullptr, /*allow_exceptions=*/false);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) {
    throw CorruptFile(fmt::format("{}: is no JSON with a weight_map", path.string()));
  }
  std::map<std::string, StateDict> shards;
  StateDict state;
  for (const auto& [name, shard] : map->items()) {
    const std::filesystem::path shard_name = shard.is_string() ? shard.get<std::string>() : "";
    if (shard_name.empty() || shard_name != shard_name.filename() || shard_name == "..") {
      throw CorruptFile(fmt::format("{}: tensor '{}' is in {}, which is no file beside it",
                                    path.string(), name, shard.dump()));
    }
    const auto shard_path = path.parent_path() / shard_name;
    StateDict& tensors = shards[shard_name];
    if (tensors.is_empty()) {
      tensors = load_file(std::make_shared<MappedFile>(shard_path), shard_path, device);
    }
    const at::Tensor* const tensor = tensors.find(name);
    if (tensor == nullptr) {
      throw CorruptFile(fmt::format("{}: has no tensor '{}', although {} says so",
                                    shard_path.string(), name, path.filename().string()));
    }
    state.insert(name, *tensor);
  }
  return state;
}

StateDict load_here(const std::filesystem::path& path, const LoadOptions& options) {
  const auto file = std::make_shared<MappedFile>(path);
  if (is_index(file->content())) return load_shards(*file, path, options.map_location);
  return load_file(file, path, options.map_location);
}

// Collective, as what follows.
void throw_if_any_failed(const std::string& error, const LoadOptions& options) {
  const std::string problem = checkpoint::first_problem(error, options.group);
  if (!problem.empty()) throw Error("load: " + problem);
}

// The tensors' names, types and shapes.
std::string describe(const StateDict& state) {
  json tensors = json::array();
  for (const auto& one : state) {
    tensors.push_back({one.key(), static_cast<int>(one.value().scalar_type()),
                       std::vector<std::int64_t>(one.value().sizes().vec())});
  }
  return tensors.dump();
}

// So that its memory can be sent.
at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor values = tensor.resolve_conj().resolve_neg().contiguous();
  // One element is contiguous with any stride, but not a view of its bytes.
  const bool is_plain = values.dim() == 0 || values.stride(-1) == 1;
  return is_plain ? values : values.clone(at::MemoryFormat::Contiguous);
}

StateDict allocate(const std::string& description, c10::Device device) {
  StateDict state;
  for (const auto& one : json::parse(description)) {
    const auto type = static_cast<at::ScalarType>(one.at(1).get<int>());
    state.insert(one.at(0).get<std::string>(), at::empty(one.at(2).get<std::vector<std::int64_t>>(),
                                                         at::TensorOptions(type).device(device)));
  }
  return state;
}

StateDict load_and_broadcast(const std::filesystem::path& path, const LoadOptions& options) {
  const BroadcastOptions from{.src = options.src, .group = options.group};
  const bool reads =
      get_rank(options.group) == distributed::group_rank_of(options.group, options.src);
  StateDict state;
  std::string tensors;
  throw_if_any_failed(attempt([&] {
                        if (!reads) return checkpoint::check_device(options.map_location);
                        for (const auto& one : load_here(path, options)) {
                          state.insert(one.key(), dense(one.value()));
                        }
                        tensors = describe(state);
                      }),
                      options);
  tensors = broadcast_bytes(tensors, from);
  throw_if_any_failed(attempt([&] {
                        if (!reads) state = allocate(tensors, options.map_location);
                      }),
                      options);
  for (const auto& one : state) {
    // Bytes, since backends do not have all types.
    broadcast(one.value().flatten().view(at::kByte), from);
  }
  return state;
}

}  // namespace

void save(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  if (!is_torch_name(path)) {
    return checkpoint::write_safetensors(state, path, options);
  }
  if (!options.metadata.empty()) {
    throw UsageError(
        fmt::format("save: SaveOptions::metadata is for safetensors files, and {} is "
                    "written as torch.save does",
                    path.string()));
  }
  checkpoint::FileWriter file(path, {.fsync = options.fsync});
  checkpoint::write_torch_file(state, file);
}

void save(const torch::nn::Module& module, const std::filesystem::path& path,
          const SaveOptions& options) {
  save(state_dict(module), path, options);
}

StateDict load(const std::filesystem::path& path, const LoadOptions& options) {
  if (!options.broadcast) return load_here(path, options);
  return parallel::with_error_context(
      "reading for all ranks; with LoadOptions::broadcast call it on all of them",
      [&] { return load_and_broadcast(path, options); }, "load");
}

void load(torch::nn::Module& module, const std::filesystem::path& path,
          const LoadOptions& options) {
  LoadOptions on_cpu = options;
  on_cpu.map_location = c10::kCPU;  // what is loaded is converted to the module's devices
  const StateDict state = load(path, on_cpu);
  const auto load_module = [&] {
    try {
      load_state_dict(module, state, options.strict);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", path.string(), error.what()));
    }
  };
  if (!options.broadcast) return load_module();
  throw_if_any_failed(attempt(load_module), options);
}

}  // namespace paceline
