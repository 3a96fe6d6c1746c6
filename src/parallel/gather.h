#pragma once

#include <ATen/ATen.h>

#include <paceline/collectives.h>

namespace paceline::parallel {

// The tensors of all ranks, which have the same shape and type, in a dimension before theirs.
// Collective.
inline at::Tensor gather(const at::Tensor& mine, const ProcessGroup& group) {
  auto sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), get_world_size(group));
  at::Tensor all = at::empty(sizes, mine.options());
  all_gather_into_tensor(all.view({-1}), mine.view({-1}), {.group = group});
  return all;
}

}  // namespace paceline::parallel
