#include "parallel/ddp/parameter_claim.h"

#include <fmt/format.h>

#include <mutex>
#include <set>

#include <paceline/error.h>

namespace paceline::ddp {
namespace {

struct Claims {
  std::mutex mutex;
  std::set<const void*> tensors;
};

// Never destroyed: a model may be a static object.
Claims& claims() {
  static auto* const all = new Claims;
  return *all;
}

}  // namespace

ParameterClaim::ParameterClaim(const std::vector<NamedTensor>& parameters) {
  const std::lock_guard lock(claims().mutex);
  for (const auto& one : parameters) {
    if (claims().tensors.count(one.tensor.unsafeGetTensorImpl()) == 0) continue;
    throw UsageError(
        fmt::format("parameter {} is wrapped by another DistributedDataParallel, which would "
                    "average its gradient twice: destroy that one first",
                    one.name));
  }
  for (const auto& one : parameters) {
    claims().tensors.insert(one.tensor.unsafeGetTensorImpl());
    tensors_.push_back(one.tensor);
  }
}

ParameterClaim::~ParameterClaim() {
  const std::lock_guard lock(claims().mutex);
  for (const auto& tensor : tensors_) claims().tensors.erase(tensor.unsafeGetTensorImpl());
}

}  // namespace paceline::ddp
