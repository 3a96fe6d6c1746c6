#include "checkpoint/snapshot.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "checkpoint/generic_dict.h"

namespace paceline::checkpoint {

at::IValue Snapshot::copy(const at::IValue& value) {
  next_ = 0;
  return copied(value);
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as the value
at::IValue Snapshot::copied(const at::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? copied(value.toTensor()) : value;
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const at::IValue& one : value.toListRef()) list.push_back(copied(one));
    return list;
  }
  if (value.isTuple()) {
    std::vector<at::IValue> elements;
    for (const at::IValue& one : value.toTupleRef().elements()) elements.push_back(copied(one));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isGenericDict()) {
    GenericDict dict = empty_dict();
    for (const auto& item : value.toGenericDict()) dict.insert(item.key(), copied(item.value()));
    return dict;
  }
  return value;
}

at::Tensor Snapshot::copied(const at::Tensor& tensor) {
  if (next_ == tensors_.size()) tensors_.emplace_back();
  at::Tensor& copy = tensors_[next_++];
  const at::NoGradGuard no_grad;
  if (!copy.defined() || copy.scalar_type() != tensor.scalar_type() ||
      copy.sizes() != tensor.sizes() || copy.strides() != tensor.strides()) {
    copy = at::empty_like(tensor, tensor.options().device(at::kCPU));
  }
  copy.copy_(tensor);
  return copy;
}

}  // namespace paceline::checkpoint
