#include "parallel/pipeline/stage_link.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.h>

#include "distributed/process_state.h"
#include "parallel/with_error_context.h"

namespace paceline::pipeline {
namespace {

// Of Pipeline's messages, so that a program's own are not taken for them; at most 32767, as every
// MPI has it.
constexpr int kTag = 0x5049;

// A header of 64-bit words: the subject, the target's hash, the number of tensors, and for each its
// type, whether it requires a gradient, its memory format, the number of its dimensions, and their
// sizes.
constexpr std::int64_t kMaxDimensions = 12;
constexpr std::int64_t kSubjectWords = 6;
constexpr std::int64_t kFirstTensor = kSubjectWords + 3;
constexpr std::int64_t kTensorWords = 4 + kMaxDimensions;
constexpr std::int64_t kUndefined = -1;  // in place of a type
constexpr auto kWords =
    kFirstTensor + static_cast<std::int64_t>(detail::kMaxStageTensors) * kTensorWords;

// A message's tensor: the memory of a dense one, whose format the header has.
at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

at::Tensor header_of(const StageLink::Tensors& tensors, const Subject& subject,
                     const TargetHash& target) {
  if (tensors.size() > detail::kMaxStageTensors) {
    throw UsageError(fmt::format("a stage's forward returns {} tensors; a Pipeline passes on {}",
                                 tensors.size(), detail::kMaxStageTensors));
  }
  at::Tensor header = at::zeros({kWords}, at::kLong);
  auto* word = header.data_ptr<std::int64_t>();
  for (const auto value :
       {subject.pipeline, static_cast<std::int64_t>(subject.kind), subject.microbatch,
        subject.microbatches, subject.call, std::int64_t{subject.training ? 1 : 0}, target.form,
        target.bytes, static_cast<std::int64_t>(tensors.size())}) {
    *word++ = value;
  }
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      *word = kUndefined;
    } else if (tensor.dim() > kMaxDimensions) {
      throw UsageError(fmt::format(
          "a stage's forward returns a tensor of {} dimensions; a Pipeline passes on {}",
          tensor.dim(), kMaxDimensions));
    } else {
      word[0] = static_cast<std::int64_t>(tensor.scalar_type());
      word[1] = tensor.requires_grad() ? 1 : 0;
      word[2] = static_cast<std::int64_t>(tensor.suggest_memory_format());
      word[3] = tensor.dim();
      std::ranges::copy(tensor.sizes(), word + 4);
    }
    word += kTensorWords;
  }
  return header;
}

std::string describe(const Subject& subject) {
  return fmt::format("{} micro-batch {} of {} in call {}, {}, of Pipeline {} of stage 0's process",
                     subject.kind == PipelineAction::Kind::forward ? "outputs of" : "gradients for",
                     subject.microbatch, subject.microbatches, subject.call,
                     subject.training ? "a step" : "an evaluation", subject.pipeline);
}

// Throws Mismatch.
void check_subject(const std::int64_t* header, const Subject& expected, int sender, int stage) {
  const Subject sent{.pipeline = header[0],
                     .kind = static_cast<PipelineAction::Kind>(header[1]),
                     .microbatch = header[2],
                     .microbatches = header[3],
                     .call = header[4],
                     .training = header[5] != 0};
  if (sent == expected) return;
  throw Mismatch(
      fmt::format("stage {} of a Pipeline waits for {}, and rank {} has sent {}: all stages must "
                  "make the same calls",
                  stage, describe(expected), sender, describe(sent)),
      {sender}, "pipeline", static_cast<std::uint64_t>(expected.call));
}

}  // namespace

StageLink::StageLink(ProcessGroup group, at::Device device)
    : group_(std::move(group)),
      device_(device),
      stage_(get_rank(group_)),
      stages_(get_world_size(group_)) {}

int StageLink::global(int stage) const {
  return distributed::global_rank_of(group_, stage);
}

void StageLink::begin_call(const at::Tensor& target) {
  sends_.clear();
  target_ = stages_ > 1 ? hash_of(target) : TargetHash();
}

void StageLink::send(const Tensors& tensors, int to_stage, const Subject& subject) {
  release_sent(subject.call);
  const SendOptions options{.group = group_, .tag = kTag};
  const int receiver = global(to_stage);
  const auto start = [&](const at::Tensor& tensor) {
    parallel::with_error_context([&] { return "sending " + describe(subject); },
                                 [&] { sends_.push_back(send_async(tensor, receiver, options)); },
                                 "Pipeline");
  };
  start(header_of(tensors, subject, target_));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    bytes_sent_ += static_cast<std::int64_t>(tensor.nbytes());
    start(flat(tensor.detach().contiguous(tensor.suggest_memory_format())));
  }
}

// Passes a target on, so that stages that have none hide no difference.
void StageLink::check_target(const TargetHash& sent, int from_stage, std::int64_t call) {
  if (!target_.is_known()) target_ = sent;
  if (!target_.contradicts(sent)) return;
  throw Mismatch(
      fmt::format("in call {} of a Pipeline, stage {} (rank {}) has another target than stage {} "
                  "(rank {}) or one before it: all ranks of a pipeline must read the same batches. "
                  "DistributedSampler's num_replicas is the number of pipelines",
                  call, stage_, global(stage_), from_stage, global(from_stage)),
      {global(from_stage)}, "pipeline", static_cast<std::uint64_t>(call));
}

auto StageLink::recv(int from_stage, const Subject& subject) -> Tensors {
  const int sender = global(from_stage);
  const RecvOptions options{.src = sender, .group = group_, .tag = kTag};
  const auto receive = [&](const at::Tensor& tensor) {
    parallel::with_error_context([&] { return "waiting for " + describe(subject); },
                                 [&] { paceline::recv(tensor, options); }, "Pipeline");
  };
  const at::Tensor header = at::empty({kWords}, at::kLong);
  receive(header);
  const auto* word = header.data_ptr<std::int64_t>();
  check_subject(word, subject, sender, stage_);
  check_target({word[kSubjectWords], word[kSubjectWords + 1]}, from_stage, subject.call);
  Tensors tensors(static_cast<std::size_t>(word[kFirstTensor - 1]));
  word += kFirstTensor;
  for (at::Tensor& tensor : tensors) {
    if (word[0] != kUndefined) {
      tensor = at::empty(at::IntArrayRef(word + 4, static_cast<std::size_t>(word[3])),
                         at::device(device_)
                             .dtype(static_cast<at::ScalarType>(word[0]))
                             .memory_format(static_cast<at::MemoryFormat>(word[2])));
      if (tensor.numel() > 0) receive(flat(tensor));
      bytes_received_ += static_cast<std::int64_t>(tensor.nbytes());
      tensor.requires_grad_(word[1] != 0);
    }
    word += kTensorWords;
  }
  return tensors;
}

void StageLink::wait(std::int64_t call) {
  await_sent(sends_.begin(), call);
}

// A message keeps its tensor. Gloo's cannot be polled, and stay until wait().
void StageLink::release_sent(std::int64_t call) {
  await_sent(std::partition(sends_.begin(), sends_.end(),
                            [](const Work& work) { return !work.is_completed(); }),
             call);
}

void StageLink::await_sent(std::vector<Work>::iterator first, std::int64_t call) {
  parallel::with_error_context(
      [&] { return fmt::format("waiting until its messages of call {} had arrived", call); },
      [&] { std::for_each(first, sends_.end(), [](Work& work) { work.wait(); }); }, "Pipeline");
  sends_.erase(first, sends_.end());
}

}  // namespace paceline::pipeline
