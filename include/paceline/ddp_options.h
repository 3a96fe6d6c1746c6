#pragma once

/// @file
/// Options of DistributedDataParallel.

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include <paceline/distributed.h>

namespace paceline {

/// What the gradients of the ranks become.
enum class Average {
  ranks,    ///< Each rank has the same weight, as in PyTorch: right for equal batches.
  samples,  ///< Each rank's weight is what it passes to set_samples: right for any batches.
  sum       ///< They are added up: right for losses that are sums over samples.
};

/// Options of DistributedDataParallel. PyTorch's come first, in its order; then Paceline's own.
struct DdpOptions {
  /// The device of a module on an accelerator, one. Arguments of a forward that are tensors, or
  /// optionals or vectors of tensors, are copied to it, unless the forward takes them by a
  /// reference that is not const. Empty: they must be there; for modules on the CPU.
  std::vector<at::Device> device_ids{};
  /// The device of the module's outputs. Unset for modules on the CPU.
  std::optional<at::Device> output_device{};
  /// Whether rank 0's buffers, such as BatchNorm's running statistics, are copied to all ranks
  /// before a forward in training mode with grad mode on, unless the last one was under no_sync.
  /// In join, the buffers of the last rank that has inputs are. Buffers that are added after
  /// construction are not copied.
  bool broadcast_buffers = true;
  /// Whether the ranks compare their models at construction, and start with rank 0's parameters and
  /// buffers. If not, the program must make them equal.
  bool init_sync = true;
  /// The ranks that average gradients.
  ProcessGroup process_group{};
  /// The largest size of a bucket in MiB; one gradient alone may be larger. Unset: 25, and 1 for
  /// the first bucket to be ready, so that communication starts early. With zero_copy, each
  /// gradient of 64 KiB or more has a bucket of its own.
  std::optional<double> bucket_cap_mb{};
  /// Allows parameters that are not used in a step, at the cost of one more small reduction a step.
  /// A parameter that some ranks used gets the average, with zero for the other ranks; a parameter
  /// that no rank used keeps its gradient. If false, the backward throws an error that names unused
  /// parameters.
  bool find_unused_parameters = false;
  /// Whether .grad becomes a view into its bucket, which the next step changes in place. Otherwise
  /// it remains a tensor of its own, at the cost of a copy. (PyTorch's default is false.)
  bool gradient_as_bucket_view = true;
  /// Promises that in every step each parameter gets as many gradients as in the first step, on
  /// each rank. Then backwards may be nested (activation checkpointing), and a parameter may get
  /// several gradients or none. Forwards must return tensors that for_each_tensor finds.
  bool static_graph = false;
  /// Names of parameters whose gradients the backward may still change after they arrive. They are
  /// reduced once param_to_hook_all_reduce has its gradient.
  std::vector<std::string> delay_all_reduce_named_params{};
  /// The name of the parameter that delay_all_reduce_named_params wait for.
  std::string param_to_hook_all_reduce{};
  /// With find_unused_parameters and without static_graph: whether a bucket is skipped if neither
  /// the step nor preceding backwards under no_sync used any of its parameters. Ranks then do not
  /// exchange which parameters are unused, so these must be the same on every rank.
  bool skip_all_reduce_unused_params = false;
  /// In place of bucket_cap_mb: the sizes of the first bucket to be ready, of the second and so on.
  /// The last one holds for all further buckets.
  std::vector<double> bucket_cap_mb_list{};

  /// In place of a size: names of parameters with which buckets end, so that a bucket is reduced
  /// when such a parameter's gradient is ready. Gradients that are ready later end in the last
  /// bucket. Apex's allreduce_trigger_params.
  std::vector<std::string> all_reduce_trigger_params{};
  /// Whether gradients of 64 KiB or more are allocated in shared memory and reduced there, without
  /// a copy; gradient_as_bucket_view then applies to smaller gradients only. Only over the backend
  /// paceline, on the CPU, without a communication hook.
  bool zero_copy = true;
  /// What gradients are averaged over. The same on all ranks.
  Average average = Average::ranks;
  /// The number of logical ranks of the job, at least as many as ranks and at most 64; 0: each rank
  /// is one. Each rank runs as many of them as the others, or one more. The job's parameters then
  /// depend on logical_ranks, but not on the number of ranks that run them: not in one bit
  /// (docs/determinism.md). Training forwards must run in a loop over
  /// DistributedDataParallel::logical_ranks(). Only with broadcast_buffers; not with communication
  /// hooks, join or skip_all_reduce_unused_params. On an accelerator, gradients go through the CPU.
  /// The same on all ranks.
  int logical_ranks = 0;
  /// The number of synchronised steps between two comparisons of the ranks' models; 0: never. They
  /// compare fingerprints of all parameters, and of buffers if broadcast_buffers keeps them equal,
  /// and throw Mismatch that names the first tensor that differs. Each comparison reads the model
  /// once.
  int check_sync_every = 0;
};

}  // namespace paceline
