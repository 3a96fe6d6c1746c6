#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/pipeline.h>

#include "parallel/pipeline/target_hash.h"

namespace paceline::pipeline {

// What a message between stages is about; both sides must mean the same.
struct Subject {
  std::int64_t pipeline;      // see StageLink
  PipelineAction::Kind kind;  // activations of a forward, or gradients of a backward
  std::int64_t microbatch;
  std::int64_t microbatches;
  std::int64_t call;  // the number of this step or evaluation, from 1
  bool training;      // whether it is a step

  bool operator==(const Subject&) const = default;
};

// Tensors to and from neighbouring stages. A transfer is a message with the sizes and types of the
// tensors, and one for each of them.
class StageLink {
 public:
  using Tensors = std::vector<at::Tensor>;

  // `group`: rank s of it runs stage s. `device`: of the tensors.
  StageLink(ProcessGroup group, at::Device device);

  int stage() const { return stage_; }
  int stages() const { return stages_; }
  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ + 1 == stages_; }

  // Begins a step or an evaluation. What an aborted one has sent goes on. `target`: as this stage
  // has it, or undefined.
  void begin_call(const at::Tensor& target);
  // Never waits for the receiver. Undefined tensors arrive as such. Throws UsageError for more than
  // detail::kMaxStageTensors tensors or too many dimensions.
  void send(const Tensors& tensors, int to_stage, const Subject& subject);
  // Tensors require gradients if the sender's do. Throws Mismatch if the sender means another
  // subject, or knows of another target.
  Tensors recv(int from_stage, const Subject& subject);
  // Returns once all that was sent has been received. `call`: for errors.
  void wait(std::int64_t call);

  std::int64_t bytes_sent() const { return bytes_sent_; }
  std::int64_t bytes_received() const { return bytes_received_; }

 private:
  int global(int stage) const;
  void check_target(const TargetHash& sent, int from_stage, std::int64_t call);
  void release_sent(std::int64_t call);
  void await_sent(std::vector<Work>::iterator first, std::int64_t call);

  ProcessGroup group_;
  at::Device device_;
  int stage_;
  int stages_;
  std::vector<Work> sends_;  // under way
  TargetHash target_;        // of this call: this stage's, or one that was received
  std::int64_t bytes_sent_ = 0;
  std::int64_t bytes_received_ = 0;
};

}  // namespace paceline::pipeline
