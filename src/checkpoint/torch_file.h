#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <memory>
#include <string_view>

#include <paceline/checkpoint.h>

#include "base/mapped_file.h"
#include "checkpoint/file_writer.h"

namespace paceline::checkpoint {

// Files of Python's torch.save: a ZIP archive of a pickle and the data of the storages.

// Throws UsageError unless tensors can be there.
void check_device(c10::Device device);

// Whether it begins like one, also of PyTorch before 1.6.
bool is_torch_file(std::string_view content);
// What tensors on the CPU have: memory of their own, or the mapped file where that is possible.
enum class StorageMemory { copied, mapped };
// See pickle_load.
at::IValue read_torch_file(const std::shared_ptr<base::MappedFile>& file,
                           const std::filesystem::path& path, c10::Device device,
                           StorageMemory memory);
// See pickle_save. Commits the file.
void write_torch_file(const at::IValue& value, FileWriter& file);
// As Python's torch.save(module.state_dict()).
void write_torch_file(const StateDict& state, FileWriter& file);

}  // namespace paceline::checkpoint
