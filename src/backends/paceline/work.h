#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace paceline::backends {

// The Work of the backend paceline: complete when complete() has been called.
class NodeWork final : public c10d::Work {
 public:
  NodeWork(c10d::OpType type, std::vector<at::Tensor> outputs, std::uint64_t sequence);

  void complete(std::exception_ptr error = nullptr);

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void settle(c10::ivalue::Future& future) const;

  std::vector<at::Tensor> outputs_;
  std::uint64_t sequence_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when somebody asks
};

}  // namespace paceline::backends
