#include "distributed/reduction.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <optional>

#include <paceline/error.h>

#include "distributed/data_type.h"

namespace paceline::distributed {
namespace {

std::optional<shm::ReduceOp> known_op(const c10d::ReduceOp& op) {
  using shm::ReduceOp;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:  // of tensors that are multiplied already
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::bit_and;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bit_or;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bit_xor;
    default:
      return std::nullopt;
  }
}

}  // namespace

Reduction reduction(const c10d::ReduceOp& op, at::ScalarType scalar, const char* operation) {
  const auto type = data_type_of(scalar);
  const auto known = known_op(op);
  if (type && known && shm::is_reducible(*type, *known)) return {*type, *known};
  if (scalar == at::kBool && known == shm::ReduceOp::avg) {
    throw UsageError(
        fmt::format("{} of Bool with AVG: the average of bools is not a bool; convert the tensor "
                    "to a floating type, or reduce it with MIN or MAX",
                    operation));
  }
  throw UsageError(fmt::format(
      "{} of {} with {}: Paceline reduces float16, bfloat16, float32, float64, int8 to int64, "
      "uint8, bool, complex64 and complex128 tensors with SUM, PRODUCT and PREMUL_SUM, all but "
      "complex ones with MIN and MAX, all but bool ones with AVG, integer and bool ones with BAND, "
      "BOR and BXOR",
      operation, c10::toString(scalar), known ? shm::name(*known) : "an unknown reduction"));
}

namespace {

// Rounded to nearest, and for whole factors exact up to int64's overflow: LibTorch multiplies
// integers by floating point numbers in float32, which does not hold all of them.
at::Tensor times(const at::Tensor& integers, const at::Tensor& factor) {
  constexpr double kExact = 0x1p53;  // all integers up to here are a double
  const at::Tensor by = factor.to(at::kDouble);
  const bool is_whole = by.equal(by.round()) && by.abs().le(kExact).all().item<bool>();
  return is_whole ? integers.to(at::kLong).mul(by.to(at::kLong))
                  : integers.to(at::kDouble).mul(by).round_();
}

}  // namespace

at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto& factor = static_cast<const c10d::PreMulSumSupplement&>(*op.supplement_);
  const at::Tensor plain = tensor.detach();
  const at::Tensor& by = factor.tensor_factor;
  if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    const at::Tensor number = at::scalar_tensor(factor.double_factor, at::kDouble);
    return times(plain, by.defined() ? by : number).to(tensor.scalar_type());
  }
  return (by.defined() ? plain.mul(by) : plain.mul(factor.double_factor)).to(tensor.scalar_type());
}

}  // namespace paceline::distributed
