#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <paceline/ddp.h>

#include "distributed/bucket_channel.h"
#include "parallel/ddp/bucketing.h"
#include "parallel/ddp/model.h"

namespace paceline::ddp {

// Averages gradients over the ranks during backward: autograd hooks copy each gradient into its
// bucket and publish buckets that are full; the final callback of the backward settles parameters
// without a gradient, finishes the reduction and leaves .grad as views of the buckets.
//
// A step lasts from the first hook of a backward to its final callback. Autograd runs both on the
// thread that called backward, for gradients on the CPU.
class Reducer {
 public:
  Reducer(const std::vector<NamedTensor>& parameters, const DdpOptions& options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  // Fixes whether backwards from here on are synchronised, and clears away a step that an exception
  // cut short: gradients that lie in buckets become zero then, since other ranks may have written
  // there. `counts` says whether this forward is one that a backward must follow.
  void before_forward(bool synchronise, bool counts);

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    at::Tensor view;  // of the bucket, in the parameter's shape
    c10::intrusive_ptr<torch::autograd::Node> accumulator;
    std::uintptr_t hook = 0;
    bool ready = false;  // in this step
    bool used = false;   // since the last synchronised step
  };

  void make_views();
  void attach_hooks();
  void on_gradient(std::size_t index);
  void reduce_gradient(std::size_t index);
  void check_backward();
  void begin_step();
  void take_gradient(Parameter& parameter);
  void count_down(std::size_t bucket);
  void finish_backward();
  void settle_unused(const std::vector<std::size_t>& missing);
  void fail_missing(const std::vector<std::size_t>& missing);
  void detach_gradients();
  std::string describe_bucket(std::size_t bucket) const;
  std::string names_of(const std::vector<std::size_t>& parameters) const;
  bool is_view(const Parameter& parameter) const;

  std::vector<Parameter> parameters_;
  bool find_unused_;
  BucketPlan plan_;
  std::unique_ptr<distributed::BucketChannel> channel_;
  std::vector<std::size_t> outstanding_;  // gradients still missing, by bucket
  bool synchronise_ = false;
  std::uint32_t forwards_ = 0;
  int backward_ = -1;  // autograd's number of the backward that began the step
};

}  // namespace paceline::ddp
