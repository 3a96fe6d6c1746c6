#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// Autograd hooks that run when a parameter's gradient has been added to its .grad.
class GradientHooks {
 public:
  // `incoming`: what autograd added.
  using Call = std::function<void(std::size_t parameter, const at::Tensor& incoming)>;

  // Attaches a hook to each parameter that is not in `left_out`. `parameters` must outlive this.
  GradientHooks(const std::vector<NamedTensor>& parameters, const std::vector<bool>& left_out,
                Call call);
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks();

  // Attaches new hooks to parameters whose data was replaced, as by torch::load. Throws UsageError
  // if a dense parameter has changed its type, device or shape since the model was wrapped.
  void renew();

  // Call in a backward: whether it adds to the .grad of any of these parameters. One that returns
  // its gradients, as torch::autograd::grad does, adds to none.
  bool are_in_this_backward() const;

 private:
  struct Hook {
    // Keeps the accumulator alive: the parameter holds it only weakly.
    c10::intrusive_ptr<torch::autograd::Node> accumulator;
    std::uintptr_t key = 0;
  };
  // The properties that a parameter must keep, since its bucket is made for them.
  struct TensorMetadata {
    at::ScalarType type;
    at::Device device;
    std::vector<std::int64_t> sizes;
    bool operator==(const TensorMetadata&) const = default;
  };

  static TensorMetadata metadata_of(const at::Tensor& tensor);
  void attach(std::size_t parameter);

  const std::vector<NamedTensor>& parameters_;
  Call call_;
  std::vector<Hook> hooks_;               // by parameter, as is the next
  std::vector<TensorMetadata> metadata_;  // when the model was wrapped
};

}  // namespace paceline::ddp
