#pragma once

#include <vector>

#include "backends/paceline/gradient_memory.h"
#include "distributed/bucket_channel.h"
#include "node/channel.h"

namespace paceline::backends {

// node::Channel with tensors.
class NodeChannel final : public distributed::BucketChannel {
 public:
  NodeChannel(node::Group& group, const std::vector<Bucket>& buckets, Describe describe,
              std::uint32_t steps, const std::vector<std::string>& parameters);

  const at::Tensor& tensor(std::size_t bucket) const override { return tensors_[bucket]; }
  void begin_step(const node::StepSummary& summary, std::optional<double> weight,
                  node::FrozenFlags frozen) override {
    channel_.begin_step(summary, weight.value_or(1), frozen);
  }
  bool in_step() const override { return channel_.in_step(); }
  std::uint32_t steps() const override { return channel_.steps(); }
  bool adopt(std::size_t bucket, const at::Tensor& gradient) override {
    return channel_.adopt(bucket, gradient.data_ptr());
  }
  void prepare_thread() override { gradients_.prefer(); }
  void publish(std::size_t bucket) override { channel_.publish(bucket); }
  void skip(std::size_t bucket) override { channel_.skip(bucket); }
  bool is_reduced(std::size_t bucket) const override { return channel_.is_reduced(bucket); }
  const std::vector<Wait>& waits() const override { return channel_.waits(); }
  double share() const override { return channel_.share(); }
  bool modified_apart() const override { return channel_.modified_apart(); }
  void try_progress() override { channel_.try_progress(); }
  void extend_timeout(std::chrono::milliseconds more) override { channel_.extend_timeout(more); }
  void finish() override { channel_.finish(); }
  bool abandon_step() override { return channel_.abandon_step(); }
  bool failed() const override { return channel_.failed(); }
  [[noreturn]] void fail(const std::string& text) override { channel_.fail(text); }
  [[noreturn]] void time_out(const std::string& text) override {
    channel_.fail(text, node::FailureKind::timeout);
  }

 private:
  node::Channel channel_;
  GradientMemory gradients_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace paceline::backends
