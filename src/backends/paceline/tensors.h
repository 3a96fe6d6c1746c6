#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <utility>
#include <vector>

#include "node/types.h"

namespace paceline::backends {

// What c10d's calls hand in, checked and put into the terms of node. All throw UsageError that
// names the operation.

// The one tensor of a call: dense and on the CPU.
at::Tensor single(const std::vector<at::Tensor>& tensors, const char* operation);
// The one list of a call: `size` tensors of the shape and type of `like`.
std::vector<at::Tensor> parts_like(const std::vector<std::vector<at::Tensor>>& lists,
                                   const at::Tensor& like, int size, const char* operation);
// That `whole` has the type and `size` times the elements of `part`.
void check_concatenation(const at::Tensor& whole, const at::Tensor& part, int size,
                         const char* operation);

node::DataType node_type(at::ScalarType type, const char* operation);
node::ReduceOp reduce_op(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* operation);
// How a tensor that is only moved is counted: in elements of its type, or in bytes.
std::pair<std::size_t, node::DataType> moved(const at::Tensor& tensor);

// A tensor's elements one after the other: the tensor's own memory, or a copy that write_back puts
// into the tensor.
class Contiguous {
 public:
  enum class Use { in, out, in_out };
  Contiguous(const at::Tensor& tensor, Use use);

  void* pointer() const { return dense_.data_ptr(); }
  std::size_t count() const { return static_cast<std::size_t>(dense_.numel()); }
  // The starts of `parts` equal parts.
  std::vector<void*> slices(int parts) const;
  void write_back() const;

 private:
  at::Tensor tensor_;
  at::Tensor dense_;
};

class ContiguousList {
 public:
  ContiguousList(const std::vector<at::Tensor>& tensors, Contiguous::Use use);
  std::vector<void*> pointers() const;
  void write_back() const;

 private:
  std::vector<Contiguous> parts_;
};

}  // namespace paceline::backends
