#pragma once

/// @file
/// Tensors in files: the parameters and buffers of modules, in the safetensors format.
///
/// Python reads these files with the package safetensors, and they have the names of Python's
/// state_dict: https://github.com/huggingface/safetensors. They contain no code. The functions are
/// safe to use from several threads at once, as far as the module and the tensors are.

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
/// "fc.weight". They share memory with the module's, and have no gradient.
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

/// Writes the tensors to a file; those that share memory are written each by itself. The file
/// appears under its name once it is complete and on the disk, also if there was another one.
///
/// Throws UsageError for what safetensors cannot contain: complex numbers of another type than
/// complex64, quantized and sparse tensors, names that are not UTF-8, and the name __metadata__.
/// Throws Error if the file cannot be written; the name keeps what it had then.
PACELINE_API void save(const StateDict& state, const std::filesystem::path& path,
                       const SaveOptions& options = {});
/// The same for state_dict(module).
PACELINE_API void save(const torch::nn::Module& module, const std::filesystem::path& path,
                       const SaveOptions& options = {});

/// Reads the tensors of a file. On the CPU they are mapped memory: the file is read when they are,
/// and not changed when they are; it must not be made shorter meanwhile.
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
