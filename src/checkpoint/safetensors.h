#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <memory>

#include <paceline/checkpoint.h>

#include "base/mapped_file.h"

namespace paceline::checkpoint {

// See load. Tensors on the CPU keep the file mapped.
StateDict read_safetensors(const std::shared_ptr<base::MappedFile>& file,
                           const std::filesystem::path& path, c10::Device device);
// See save.
void write_safetensors(const StateDict& state, const std::filesystem::path& path,
                       const SaveOptions& options);

}  // namespace paceline::checkpoint
