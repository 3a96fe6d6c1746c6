#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "shm/buckets/leaf_plan.h"

namespace paceline::ddp {

// Adds up the gradients of the leaves that this rank has, one sum for each part of its range, in
// the order of shm::Tree. The partial sums of a part are kept like the digits of a binary counter:
// after n leaves there is one for each bit of n.
class GradientSums {
 public:
  // `parts`: of this rank, ascending.
  GradientSums(std::size_t parameters, std::vector<shm::LeafRange> parts);

  // Adds a parameter's gradient in a leaf of the range, from 0; leaves come in ascending order.
  // `gradient`: dense, in the same layout for all leaves; this takes it over, and may
  // overwrite it. Not read if `weight` is 0.
  void add(std::size_t parameter, int leaf, at::Tensor gradient, double weight);
  // Once all leaves were added: the parameter's sums, by part. If a part has one leaf, the sum is
  // its gradient, not multiplied by its weight; otherwise it is the weighted sum, in accumulation
  // type. It is undefined if all weights are 0.
  std::vector<at::Tensor> take(std::size_t parameter);
  // Drops what was added.
  void clear();

 private:
  struct Node {
    at::Tensor values;  // undefined if all weights are 0
    double weight;      // of a leaf; 1 once it is applied
    bool is_sum = false;
  };
  struct Sums {
    std::vector<at::Tensor> complete;  // by part
    std::vector<Node> partial;         // of the next part, from the left
  };

  static void make_sum(Node& node);
  static Node combine(Node left, Node right);

  std::vector<shm::LeafRange> parts_;
  std::vector<Sums> sums_;  // by parameter
};

}  // namespace paceline::ddp
