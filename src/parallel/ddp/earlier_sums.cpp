#include "parallel/ddp/earlier_sums.h"

#include <utility>

namespace paceline::ddp {

void EarlierSums::note() {
  for (std::size_t i = 0; i < sums_.size(); ++i) note(i);
}

void EarlierSums::note(std::size_t parameter) {
  const at::Tensor& grad = parameters_[parameter].tensor.grad();
  sums_[parameter].reset();
  if (grad.defined()) sums_[parameter].emplace(grad.getIntrusivePtr());
}

bool EarlierSums::take(std::size_t parameter) {
  if (sums_.empty()) return false;
  const auto noted = std::exchange(sums_[parameter], std::nullopt);
  const at::Tensor& grad = parameters_[parameter].tensor.grad();
  return noted && grad.defined() && noted->lock().get() == grad.unsafeGetTensorImpl();
}

}  // namespace paceline::ddp
