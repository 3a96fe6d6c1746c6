#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>

#include <paceline/all_reduce_algorithms.h>

#include "distributed/reduction.h"
#include "distributed/start.h"

namespace paceline::distributed {

// A call of an algorithm for an all-reduce, on a rank that is a member of the group.
class CountedAllReduce {
 public:
  // Compares the ranks' calls: collective. `details` ends the description of this rank's call.
  CountedAllReduce(const char* operation, const at::Tensor& tensor, const AllReduceOptions& options,
                   const std::string& details = "");

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Parts of the tensor, whose sizes differ by one element at most; the first ones are larger.
  Tensors cut(int parts) const { return flat_.tensor_split(parts); }

  // A message to or from a rank of the group, which is counted. An empty part sends none.
  Work send(const at::Tensor& part, int to);
  Work receive(const at::Tensor& part, int from);

  void add(const at::Tensor& part, const at::Tensor& sum) const;
  // Of a part that all ranks have added up.
  void divide_if_average(const at::Tensor& sum) const;

  // Writes the result into the tensor, if it is not there.
  Traffic finish();

 private:
  void reduce(shm::ReduceOp op, std::span<const void* const> sources, const at::Tensor& to) const;

  at::Tensor tensor_;
  ProcessGroup group_;
  int rank_;
  int size_;
  Reduction how_{};
  at::Tensor flat_;  // contiguous: the tensor's memory or a copy
  Traffic traffic_;
};

}  // namespace paceline::distributed
