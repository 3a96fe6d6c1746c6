#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace paceline::data_parallel {

// A parameter of the module, once even if it has several names.
struct SharedParameter {
  std::string name;
  at::Tensor original;
  // By replica: leaf tensors that stand for the original. Several if a copy of the module has one
  // for each name.
  std::vector<std::vector<at::Tensor>> leaves;
};

// The module and its copies, which have the same parameters.
class Replicas {
 public:
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

  // Takes copies of `module`, at least one, each on its device. Throws UsageError if their
  // parameters or buffers are not the same.
  Replicas(std::shared_ptr<torch::nn::Module> module, Modules replicas,
           std::vector<at::Device> devices);

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const Modules& modules() const { return replicas_; }
  const std::vector<SharedParameter>& parameters() const { return parameters_; }

  // Brings the first `count` replicas to the module's present values, types and modes. Throws
  // UsageError if the module has moved to another device, and, now and then, if it has got other
  // parameters.
  void before_forward(std::size_t count);
  // Takes over buffers to which replica 0 gave other memory. Throws UsageError, and drops the
  // gradients, if a backward ran within a replica.
  void after_forward(std::size_t count);

 private:
  struct Buffer {
    std::string name;
    at::Tensor original;
    std::vector<at::Tensor> copies;  // by replica
  };

  using Index = std::unordered_map<const c10::TensorImpl*, std::size_t>;

  void match_parameters(std::size_t replica, const Index& index);
  void match_buffers(std::size_t replica);
  void check_parameters() const;
  void follow_modes(std::size_t replica);
  void follow_parameter(const SharedParameter& parameter, std::size_t replica) const;
  void follow_buffer(const Buffer& buffer, std::size_t replica) const;
  void check_device(const std::string& name, const at::Tensor& original) const;
  // Whether the replica has the module's memory.
  bool shares_memory(std::size_t replica) const { return devices_[replica] == devices_[0]; }

  std::shared_ptr<torch::nn::Module> module_;
  Modules replicas_;
  std::vector<at::Device> devices_;
  Modules submodules_;                       // of the module, itself first
  std::vector<Modules> replica_submodules_;  // by replica, in the same order
  std::vector<SharedParameter> parameters_;
  std::vector<Buffer> buffers_;
  std::uint64_t forwards_ = 0;
};

}  // namespace paceline::data_parallel
