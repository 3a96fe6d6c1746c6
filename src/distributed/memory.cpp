#include <ATen/ATen.h>

#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <paceline/collectives.h>

#include "distributed/translate.h"

namespace paceline {

at::Tensor allocate_tensor(at::IntArrayRef sizes, const at::TensorOptions& options,
                           const ProcessGroup& group) {
  return distributed::translate("allocate_tensor", [&] {
    if (!group.is_member()) return at::empty(sizes, options);
    const auto backend = group.c10d()->getBackend(options.device().type());
    if (!backend->supportsTensorAlloc(options.device().index())) return at::empty(sizes, options);
    return backend->allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
  });
}

}  // namespace paceline
