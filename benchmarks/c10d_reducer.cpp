#include "benchmarks/c10d_reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <limits>
#include <tuple>
#include <utility>

namespace paceline::bench {
namespace {

constexpr std::size_t kBroadcastBytes = std::size_t{250} << 20;

// PyTorch's defaults: at first one bucket of everything; after the first step, buckets of 25 MiB in
// the order of the gradients, the first of 1 MiB.
std::shared_ptr<c10d::Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                            const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const std::vector<bool> none_sparse(parameters.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {std::numeric_limits<std::size_t>::max()}, none_sparse));
  return std::make_shared<c10d::Reducer>(
      parameters, std::move(buckets), group, none_sparse,
      /*bucket_bytes_cap=*/c10d::kDefaultBucketBytesCap, /*find_unused_parameters=*/false,
      /*gradient_as_bucket_view=*/false, /*param_names=*/
      std::unordered_map<std::size_t, std::string>{},
      /*first_bucket_bytes_cap=*/c10d::kDefaultFirstBucketBytes,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<std::int64_t>{});
}

}  // namespace

C10dReducerDdp::C10dReducerDdp(std::shared_ptr<models::Classifier> module,
                               c10::intrusive_ptr<c10d::ProcessGroup> group)
    : module_(std::move(module)), group_(std::move(group)), buffers_(module_->buffers()) {
  std::vector<torch::Tensor> state = module_->parameters();
  reducer_ = make_reducer(state, group_);
  for (torch::Tensor& tensor : state) tensor = tensor.detach();
  state.insert(state.end(), buffers_.begin(), buffers_.end());
  c10d::broadcast_coalesced(group_, state, kBroadcastBytes);
}

torch::Tensor C10dReducerDdp::forward(const torch::Tensor& x) {
  reducer_->prepare_for_forward();
  reducer_->rebuild_buckets();
  if (!buffers_.empty()) c10d::broadcast_coalesced(group_, buffers_, kBroadcastBytes);
  torch::Tensor y = module_->forward(x);
  // Which outputs the loss is made of matters only where unused parameters are looked for.
  reducer_->prepare_for_backward({});
  return y;
}

}  // namespace paceline::bench
