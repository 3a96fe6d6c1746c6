#include "parallel/ddp/sparse_gradients.h"

#include <ATen/ATen.h>

#include <paceline/collectives.h>

namespace paceline::ddp {
namespace {

// A sparse gradient of zero, like an embedding's.
at::Tensor zeros_for(const at::Tensor& parameter) {
  return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(),
                                          parameter.options().layout(at::kSparse));
}

}  // namespace

void reduce_sparse(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                   double share, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    if (!parameters[i].sparse || !used[i]) continue;
    at::Tensor& grad = parameter.mutable_grad();
    at::Tensor part = !grad.defined()    ? zeros_for(parameter)
                      : grad.is_sparse() ? grad
                                         : grad.to_sparse(1);
    // The gradients of a rank without samples may not even be finite.
    part = share == 0 ? zeros_for(parameter) : part.coalesce().mul(share);
    all_reduce(part, {.group = group});
    grad = part;
  }
}

void reduce_sparse_zeros(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                         const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].sparse && used[i]) {
      all_reduce(zeros_for(parameters[i].tensor), {.group = group});
    }
  }
}

}  // namespace paceline::ddp
