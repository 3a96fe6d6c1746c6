#pragma once

#include <exception>

namespace paceline::python {

// Raises torch.distributed's own error for one of ours: UsageError becomes ValueError, all others
// DistBackendError; an error about other ranks gets attributes beside its text. Rethrows other
// exceptions. Needs the GIL.
void set_python_error(std::exception_ptr thrown);

// Call while an exception that leaves a backward is handled: throws ours as the Python exception
// that it becomes, which autograd passes on as it is. Needs no GIL.
void throw_through_autograd();

}  // namespace paceline::python
