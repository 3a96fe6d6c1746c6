#pragma once

/// @file
/// Tensors in files: the parameters and buffers of modules, in the safetensors format and in that
/// of Python's torch.save.
///
/// Python reads and writes safetensors files with the package of that name, which also specifies
/// the format: https://github.com/huggingface/safetensors. No code in a file is ever run. The
/// functions are thread-safe if no other thread changes the module or the tensors meanwhile.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/ordered_dict.h>

#include <filesystem>
#include <map>
#include <string>

#include <paceline/api.h>
#include <paceline/distributed.h>

namespace c10 {
struct IValue;
}
namespace at {
using c10::IValue;
}
namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace paceline {

/// Tensors by their names.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// The parameters and buffers of a module, with the names and the order of Python's state_dict:
/// "fc.weight". They share memory with the module and require no gradient.
[[nodiscard]] PACELINE_API StateDict state_dict(const torch::nn::Module& module);

/// The tensors of a state dict or of a whole torch.nn.Module that pickle_load gave. They require no
/// gradient. Throws Error, which lists the names, if the value is neither.
[[nodiscard]] PACELINE_API StateDict state_dict(const at::IValue& value);

/// Copies the tensors into the parameters and buffers of these names, and converts them to their
/// types and devices. If all names begin with "module.", which Python's DistributedDataParallel
/// adds, this prefix is removed, unless names of the module itself begin with it. Throws Error, and
/// changes nothing, if a shape or layout differs, or if a complex tensor would become real; if
/// `strict`, also if a name is missing or is not the module's.
PACELINE_API void load_state_dict(torch::nn::Module& module, const StateDict& state,
                                  bool strict = true);

/// The state of one of LibTorch's optimizers (SGD, Adam, AdamW, RMSprop, Adagrad, LBFGS) or of
/// those in optimizers.h: a dict with the form and the names of Python's, "state" and
/// "param_groups". Its tensors share memory with the optimizer. Throws UsageError for another
/// optimizer.
[[nodiscard]] PACELINE_API at::IValue state_dict(const torch::optim::Optimizer& optimizer);
/// Sets the options of the optimizer's groups and the states of its parameters, which are matched
/// by their order in the groups. Throws Error, and changes nothing, if groups, parameters or shapes
/// differ, if something is missing, or if an option of Python's, such as maximize, is set that
/// LibTorch's optimizers do not have. A state of a parameter that no group lists is refused, too.
PACELINE_API void load_state_dict(torch::optim::Optimizer& optimizer, const at::IValue& state);

/// Options of save.
struct SaveOptions {
  /// Texts in a safetensors file. If a text is the name of a tensor, its key is read as another
  /// name of that tensor, as Python's package writes them.
  std::map<std::string, std::string> metadata{};
  /// Whether save waits until the file is on the disk. If not, it survives the end of the process,
  /// but maybe not that of the machine, after which an earlier file may be lost too.
  bool fsync = true;
};

/// Options of load.
struct LoadOptions {
  /// Where the tensors of the returned StateDict are. What is loaded into a module is on the
  /// module's devices.
  c10::Device map_location = c10::kCPU;
  bool strict = true;  ///< For a module; see load_state_dict.
  /// Whether only rank `src` reads the file, and sends the tensors to the other ranks: where not
  /// all of them see the file, or to read it once. The call is collective then. If it fails on one
  /// rank, it throws Error on all, which names the rank and the cause.
  bool broadcast = false;
  int src = 0;           ///< The rank that reads. Only with broadcast.
  ProcessGroup group{};  ///< The ranks that take part. Only with broadcast.
};

/// Writes the tensors to a file: with the extension .pt or .pth as torch.save(module.state_dict())
/// does, which torch.load(weights_only=True) reads, otherwise as safetensors. The file appears, or
/// replaces an earlier one, once it is complete.
///
/// Tensors that share memory share it again after torch.load. A safetensors file has a tensor of
/// several names once, as Python's save_model writes it, with its other names in the metadata;
/// other tensors that share memory are written separately. Throws UsageError for tensors that are
/// not dense, or that share memory and have different types, in a .pt file; for types, names and
/// texts that the format does not have: safetensors has complex64 only, and no name __metadata__;
/// and Error if the file cannot be written. An earlier file stays as it is then. If the process is
/// killed meanwhile, a temporary file .NAME.12345678 is left.
PACELINE_API void save(const StateDict& state, const std::filesystem::path& path,
                       const SaveOptions& options = {});
/// The same for state_dict(module).
PACELINE_API void save(const torch::nn::Module& module, const std::filesystem::path& path,
                       const SaveOptions& options = {});

/// Reads the tensors of a file: safetensors, a state dict or a whole module of torch.save (see
/// pickle_load), or the index.json of a model in several files, which are beside it. The content
/// tells which it is.
///
/// Tensors on the CPU are the mapped file where possible: the disk is read when a tensor is first
/// used, and changing a tensor does not change the file. The file must be neither truncated nor
/// rewritten in place while such a tensor exists, which cp and Python's torch.save do; save
/// replaces it.
///
/// Throws CorruptFile, with the path and the byte or the tensor, if the file does not follow the
/// format, UsageError for element types that LibTorch does not have, and Error if it cannot be
/// read.
[[nodiscard]] PACELINE_API StateDict load(const std::filesystem::path& path,
                                          const LoadOptions& options = {});
/// Reads a file into a module: load_state_dict(module, load(path)). Throws what both throw.
PACELINE_API void load(torch::nn::Module& module, const std::filesystem::path& path,
                       const LoadOptions& options = {});

/// Reads what Python's torch.save wrote, from PyTorch 1.6 on: None, numbers, texts, lists, tuples,
/// dicts and dense tensors, so also the states of Python's optimizers and schedulers. Tensors that
/// shared a storage share it again. In place of what LibTorch does not have there is: a dict for
/// OrderedDict and Counter, without `_metadata`; a tuple for torch.Size; a list for a set; the
/// number of the ScalarType for a dtype; a string for bytes, which pickle_save refuses if they are
/// not UTF-8, and for a class, a function or another dtype.
///
/// No code of the file is run. An object of another class is a dict of its attributes, with the
/// name of the class as "__class__", the arguments of its construction as "__args__", what was
/// appended to it as "__list__", and a state that is not a dict as "__state__".
///
/// Throws CorruptFile, which names the path, if the file does not follow the format; UsageError for
/// sparse and quantized tensors, storages outside of tensors, integers outside of int64, keys of
/// dicts that are neither texts nor numbers, values that contain themselves or are nested deeper
/// than 1000, TorchScript programs, older files, and a device that is not there; and Error if it
/// cannot be read. The tensors do not use the file afterwards.
[[nodiscard]] PACELINE_API at::IValue pickle_load(const std::filesystem::path& path,
                                                  c10::Device map_location = c10::kCPU);
/// Writes such a file, which torch.load(weights_only=True) reads: None, numbers, texts, devices,
/// dense tensors, and lists, tuples and dicts of these. Throws as save does.
PACELINE_API void pickle_save(const at::IValue& value, const std::filesystem::path& path);

}  // namespace paceline
