#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <paceline/data_parallel.h>

#include "parallel/data_parallel/replica_team.h"
#include "parallel/data_parallel/replicas.h"
#include "parallel/data_parallel/scatter.h"

namespace paceline::detail {

// DataParallel of any module.
class DataParallelCore {
 public:
  using Tensors = DataParallelHandle::Tensors;

  // Takes copies of the module, one for each of `devices`.
  DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                   data_parallel::Replicas::Modules replicas,
                   const std::vector<at::Device>& devices, const DataParallelOptions& options);

  const data_parallel::Replicas& replicas() const { return replicas_; }
  const DataParallelStats& stats() const { return team_->stats(); }
  Tensors run(const Tensors& tensors, std::size_t most, const DataParallelHandle::Call& call);

 private:
  data_parallel::ScatteredBatch scatter(const Tensors& tensors, std::size_t most);
  Tensors gather(const std::vector<Tensors>& outputs, const Tensors& tensors,
                 const data_parallel::ScatteredBatch& batch);

  data_parallel::Replicas replicas_;
  std::shared_ptr<data_parallel::ReplicaTeam> team_;
  std::int64_t dim_;
  at::Device output_device_;
};

}  // namespace paceline::detail
