#pragma once

#include <torch/csrc/utils/pybind.h>

namespace paceline::python {

// Binds what paceline.DistributedDataParallel stands on.
void bind_ddp(pybind11::module_& module);

}  // namespace paceline::python
