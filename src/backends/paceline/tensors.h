#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <vector>

#include "distributed/reduction.h"
#include "shm/collectives/group.h"

namespace paceline::backends {

// The tensors of c10d's calls, checked and translated for shm::Collectives. All checks throw a
// UsageError that names the operation.

using distributed::Reduction;
using distributed::reduction;
using Tensors = std::vector<at::Tensor>;

// That the tensor is dense and on the CPU.
void check_dense(const at::Tensor& tensor, const char* operation);
// The one tensor of a call, dense and on the CPU.
const at::Tensor& single(const Tensors& tensors, const char* operation);
// The one list of a call, with a tensor of the type of `like` for each of `size` ranks.
const Tensors& single_list(const std::vector<Tensors>& lists, const at::Tensor& like, int size,
                           const char* operation);
void check_list(const Tensors& list, const at::Tensor& like, int size, const char* operation);
void check_same_type(const at::Tensor& a, const at::Tensor& b, const char* operation);
// That all of `parts` have as many elements as `like`.
void check_same_size(const Tensors& parts, const at::Tensor& like, const char* operation);
// As many outputs as inputs, and not none.
void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* operation);
// That `whole` has the type and `size` times the elements of `part`.
void check_concatenation(const at::Tensor& whole, const at::Tensor& part, int size,
                         const char* operation);

// The size of a tensor that is only moved: elements of its type if shm knows it, else bytes.
struct ByteLayout {
  std::size_t count;
  shm::DataType type;
};
ByteLayout byte_layout(const at::Tensor& tensor);

// A tensor's elements one after the other: the tensor's own memory, or a copy that write_back puts
// into the tensor. Counts are as in ByteLayout.
class Flat {
 public:
  enum class Use { in, out, in_out };
  Flat(const at::Tensor& tensor, Use use);

  void* data() const { return dense_.data_ptr(); }
  std::size_t count() const { return layout_.count; }
  shm::DataType type() const { return layout_.type; }
  shm::Input input() const { return {data(), count()}; }
  shm::Output output() const { return {data(), count()}; }
  void write_back() const;

 private:
  at::Tensor tensor_;
  at::Tensor dense_;
  ByteLayout layout_;
};

// Parts of one tensor, or several tensors, as shm::Collectives takes them.
class Parts {
 public:
  // Each tensor is a part.
  Parts(const Tensors& tensors, Flat::Use use);
  // One tensor, cut into `counts` (of elements), or into `parts` equal ones.
  Parts(const at::Tensor& tensor, const std::vector<std::int64_t>& counts, Flat::Use use);
  Parts(const at::Tensor& tensor, int parts, Flat::Use use);

  const std::vector<shm::Input>& inputs() const { return inputs_; }
  const std::vector<shm::Output>& outputs() const { return outputs_; }
  shm::DataType type() const { return flats_.front().type(); }
  void write_back() const;

 private:
  void add(void* data, std::size_t count);

  std::vector<Flat> flats_;
  std::vector<shm::Input> inputs_;
  std::vector<shm::Output> outputs_;
};

// How all_to_all_single cuts a tensor: in `splits` of its first dimension, or equally if there are
// none. Gives elements.
std::vector<std::int64_t> split_counts(const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& splits, int size,
                                       const char* operation);

}  // namespace paceline::backends
