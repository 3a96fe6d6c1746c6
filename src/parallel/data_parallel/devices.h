#pragma once

#include <torch/nn/module.h>

#include <vector>

#include <paceline/data_parallel.h>

namespace paceline::data_parallel {

// The device of each replica. Throws UsageError for options that do not fit the module or each
// other.
std::vector<at::Device> choose_devices(const torch::nn::Module& module,
                                       const DataParallelOptions& options);

}  // namespace paceline::data_parallel
