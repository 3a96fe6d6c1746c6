#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include <paceline/error.h>

#include "parallel/ddp/reducer.h"

// The part of Reducer for the leaves of a step: this rank's logical ranks, or the rank itself.
namespace paceline::ddp {

void Reducer::count_leaves() {
  const int count = leaves().range(get_rank(options_.process_group)).count;
  graphs_.resize(static_cast<std::size_t>(count), graphs_[0]);
  summarizer_.set_leaves(count);
}

void Reducer::set_leaves(std::vector<shm::LeafRange> ranges) {
  if (options_.static_graph) {
    throw UsageError(
        "logical ranks cannot be assigned anew with static_graph: each may have a graph of its "
        "own");
  }
  earlier_sums_.keep([&] { buckets_.set_leaves(std::move(ranges)); });
  leaf_ = 0;
  count_leaves();
}

void Reducer::prepare_leaves() {
  if (left_) abort_step();
  reorder_if_due();
}

void Reducer::begin_leaves() {
  leaves_ended_ = 0;
  in_leaves_ = true;
  buckets_.begin_leaves();
}

void Reducer::begin_leaf(int leaf) {
  if (leaf > 0) check_leaf();
  leaf_ = leaf;
  buckets_.begin_leaf(leaf);
}

void Reducer::end_leaves() {
  check_leaf();
  in_leaves_ = false;
}

void Reducer::leave_leaves() {
  if (!std::exchange(in_leaves_, false)) return;
  left_ = !is_step_complete();
  if (!left_) return;
  buckets_.leave_leaves();
  buckets_.detach_from_failed();
}

std::string Reducer::name_of_leaf(int leaf) const {
  const int first = leaves().range(get_rank(options_.process_group)).first;
  return fmt::format("logical rank {}", first + leaf);
}

// Either every leaf has a synchronised backward in the step, or none.
void Reducer::check_leaf() {
  if (leaves_ended_ <= leaf_ && summarizer_.ran_local_backward(leaf_)) {
    fail_leaf(leaf_,
              "ran backwards under no_sync and then none that is synchronised: accumulate inside "
              "the loop over logical ranks, all but the last backward under no_sync");
  }
  if (leaves_ended_ == 0 || leaves_ended_ == leaf_ + 1) return;
  fail_leaf(leaf_, fmt::format("ran no synchronised backward in this step, and {} did: give it a "
                               "loss of zero, or with Average::samples no samples",
                               name_of_leaf(0)));
}

void Reducer::check_leaf_is_new() {
  if (options_.logical_ranks > 0 && !in_leaves_) {
    throw UsageError(
        "with logical_ranks, run a synchronised backward inside the loop over logical_ranks()");
  }
  if (leaves_ended_ == leaf_) return;
  fail_leaf(leaf_, leaves_ended_ > leaf_
                       ? "ran a second synchronised backward in this step: run all but its last "
                         "under no_sync"
                       : fmt::format("ran a synchronised backward in this step, and {} did not",
                                     name_of_leaf(0)));
}

void Reducer::fail_leaf(int leaf, const std::string& text) {
  bucket_reducer().fail(fmt::format("{} {}", name_of_leaf(leaf), text));
  __builtin_unreachable();  // GCC 12 ignores noreturn on a virtual function
}

void Reducer::take_sparse() {
  std::vector<at::Tensor> gradients;
  for (const NamedTensor& parameter : parameters_) {
    gradients.push_back(parameter.sparse ? parameter.tensor.grad() : at::Tensor());
  }
  sparse_leaves_.push_back(std::move(gradients));
}

// A missing gradient counts as zero.
void Reducer::end_leaf(const Indices& missing) {
  const at::NoGradGuard no_grad;
  for (const std::size_t i : missing) {
    if (!ready_[i]) mark_ready(i);
  }
  take_sparse();
  recorder_.end_leaf();
  end_backward();
  on_leaf_complete_(leaf_);
}

}  // namespace paceline::ddp
