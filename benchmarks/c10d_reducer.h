#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "models/classifier.h"

namespace c10d {
class Reducer;
}

namespace paceline::bench {

// What PyTorch's DistributedDataParallel does around c10d::Reducer with its default options,
// without the Python. Construction and forward are collective over the group.
class C10dReducerDdp {
 public:
  C10dReducerDdp(std::shared_ptr<models::Classifier> module,
                 c10::intrusive_ptr<c10d::ProcessGroup> group);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  std::shared_ptr<models::Classifier> module_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<torch::Tensor> buffers_;
  std::shared_ptr<c10d::Reducer> reducer_;
};

}  // namespace paceline::bench
