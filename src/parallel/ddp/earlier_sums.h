#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// With Average::sum, which gradients hold the sum of an earlier step. All ranks have that, so only
// the first rank may add it to the sum of the next step.
class EarlierSums {
 public:
  // `counts`: for a rank that leaves its own out.
  EarlierSums(const std::vector<NamedTensor>& parameters, bool counts)
      : parameters_(parameters), sums_(counts ? parameters.size() : 0) {}

  // Notes at the end of a step that each .grad is a sum.
  void note();
  // Whether .grad still is the tensor that was noted, whose part of the next sum is zero then.
  // True once.
  bool take(std::size_t parameter);
  // For what replaces .grad by a copy.
  template <typename Body>
  void keep(Body&& body) {
    std::vector<bool> taken(sums_.size());
    for (std::size_t i = 0; i < taken.size(); ++i) taken[i] = take(i);
    body();
    for (std::size_t i = 0; i < taken.size(); ++i) {
      if (taken[i]) note(i);
    }
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  void note(std::size_t parameter);

  const std::vector<NamedTensor>& parameters_;
  std::vector<std::optional<WeakTensor>> sums_;  // by parameter
};

}  // namespace paceline::ddp
