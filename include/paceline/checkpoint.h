#pragma once

/// @file
/// Tensors in files: the parameters and buffers of modules, in the safetensors format.
///
/// Python reads and writes the same files with the package safetensors, which also specifies the
/// format: https://github.com/huggingface/safetensors. They contain no code. The functions are
/// thread-safe if no other thread changes the module or the tensors meanwhile.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/ordered_dict.h>

#include <filesystem>
#include <map>
#include <string>

#include <paceline/api.h>

namespace torch::nn {
class Module;
}

namespace paceline {

/// Tensors by their names.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// The parameters and buffers of a module, with the names and the order of Python's state_dict:
/// "fc.weight". They share memory with the module and require no gradient.
[[nodiscard]] PACELINE_API StateDict state_dict(const torch::nn::Module& module);

/// Copies the tensors into the parameters and buffers of these names, converted to their types and
/// devices. Throws Error, and changes nothing, if a shape differs; if `strict`, also if a name is
/// missing or is not the module's.
PACELINE_API void load_state_dict(torch::nn::Module& module, const StateDict& state,
                                  bool strict = true);

/// Options of save.
struct SaveOptions {
  std::map<std::string, std::string> metadata{};  ///< Texts that the file contains, too.
};

/// Options of load.
struct LoadOptions {
  c10::Device map_location = c10::kCPU;  ///< Where the tensors are.
  bool strict = true;                    ///< See load_state_dict.
};

/// Writes the tensors to a file. Tensors that share memory are written separately. The file
/// appears, or replaces an earlier one, once it is complete and on the disk.
///
/// Throws UsageError for what the format does not have: complex types other than complex64,
/// quantized and sparse tensors, names that are not UTF-8, and the name __metadata__. Throws Error
/// if the file cannot be written. An earlier file stays as it is then.
PACELINE_API void save(const StateDict& state, const std::filesystem::path& path,
                       const SaveOptions& options = {});
/// The same for state_dict(module).
PACELINE_API void save(const torch::nn::Module& module, const std::filesystem::path& path,
                       const SaveOptions& options = {});

/// Reads the tensors of a file. Tensors on the CPU are the mapped file: the disk is read when a
/// tensor is first used, and changing a tensor does not change the file. The file must not be
/// truncated while such a tensor exists; save does not truncate, but replaces it.
///
/// Throws CorruptFile, with the path and the byte or the tensor, if the file does not follow the
/// format, UsageError for element types that LibTorch does not have, and Error if it cannot be
/// read.
[[nodiscard]] PACELINE_API StateDict load(const std::filesystem::path& path,
                                          const LoadOptions& options = {});
/// Reads a file into a module: load_state_dict(module, load(path)). Throws what both throw.
PACELINE_API void load(torch::nn::Module& module, const std::filesystem::path& path,
                       const LoadOptions& options = {});

}  // namespace paceline
