#include <ATen/ATen.h>

#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <paceline/collectives.h>

#include "distributed/translate.h"

namespace paceline {

at::Tensor allocate_tensor(at::IntArrayRef sizes, const at::TensorOptions& options,
                           const ProcessGroup& group) {
  const auto plain = options.requires_grad(false);
  const auto allocate = [&] {
    if (!group.is_member()) return at::empty(sizes, plain);
    const auto backend = group.c10d()->getBackend(options.device().type());
    if (!backend->supportsTensorAlloc(options.device().index())) return at::empty(sizes, plain);
    const at::Tensor shape = at::empty(sizes, plain.device(at::kMeta));
    const at::Tensor memory =
        backend->allocateTensor(c10::multiply_integers(sizes), plain.memory_format(std::nullopt));
    return memory.as_strided(sizes, shape.strides());
  };
  return distributed::translate("allocate_tensor", allocate)
      .set_requires_grad(options.requires_grad());
}

}  // namespace paceline
