#pragma once

#include "backends/paceline/tensors.h"

namespace paceline::backends {

// Throws UsageError if memory that a call writes belongs to two of its outputs, or also to an
// input: its content would depend on the path that the call takes. Exact for any strides, and takes
// no memory for the tensors' elements. Tensors whose strides differ and whose extents interleave
// may take longer than copying them.
void check_apart(const Tensors& outputs, const Tensors& inputs, const char* operation);

// Whether `part` already is where a call puts it: part number `index` of `whole`, or all of it.
bool is_in_place(const at::Tensor& part, const at::Tensor& whole, int index = 0);
// `inputs` without the one that this rank gives itself, if that is in place.
Tensors without_own(const Tensors& inputs, int own, const at::Tensor& output);
// The same for inputs in one tensor, one after the other, each as large as `output`.
Tensors without_own_part(const at::Tensor& input, int own, const at::Tensor& output);

}  // namespace paceline::backends
