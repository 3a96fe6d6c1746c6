#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// Autograd's hooks that tell when a parameter's gradient has been added to its .grad.
class GradientHooks {
 public:
  // `incoming`: what autograd added.
  using Call = std::function<void(std::size_t parameter, const at::Tensor& incoming)>;

  // For all but the parameters in `left_out`. `parameters` must outlive this.
  GradientHooks(const std::vector<NamedTensor>& parameters, const std::vector<bool>& left_out,
                Call call);
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks();

  // A parameter whose data was replaced, as by torch::load, needs a new hook. Throws UsageError if
  // a dense parameter is not what it was when the model was wrapped.
  void renew();

 private:
  // On a parameter's accumulator, which the parameter itself holds weakly.
  struct Hook {
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
