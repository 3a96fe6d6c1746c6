#pragma once

/// @file
/// Communication hooks of DistributedDataParallel.

#include <ATen/core/ivalue.h>

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <functional>
#include <memory>
#include <optional>

// Declared only, as their header costs every source file seconds: hooks of your own include
// <torch/csrc/distributed/c10d/comm.hpp>.
namespace c10d {
class GradBucket;
class CommHookInterface;
}  // namespace c10d

namespace paceline {

/// A bucket of gradients: getIndex, getBuffer (flat; in memory that the ranks share, if the backend
/// has such), getGradients, getParameters, isLast, setBuffer.
using GradBucket = c10d::GradBucket;

/// Communicates a bucket in place of DistributedDataParallel; see register_comm_hook. It starts the
/// communication and returns a future of the bucket's new contents: a tensor of the bucket's size,
/// either the bucket itself or another. The hook must average. It is called on every rank for the
/// same buckets in the same order, on the thread of the backward. State belongs to the function
/// object.
///
/// Complete every future, also if the hook fails. If a future is not complete within the group's
/// timeout, counted from the end of the last call that it may depend on, the step throws Timeout
/// that names this rank. Calls made later than one timeout after the end of the backward do not
/// count.
using CommHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&)>;

namespace detail {
PACELINE_API std::shared_ptr<c10d::CommHookInterface> make_comm_hook(CommHook hook);
}

namespace comm_hooks {

/// What DistributedDataParallel does without a hook, by one collective for each bucket. A building
/// block for custom hooks.
///
/// `group`, here and in the next two: the ranks to average over. Unset: the process_group of the
/// model that runs the hook; a custom hook then calls this one on its own thread before it returns.
/// On another thread it throws UsageError.
PACELINE_API CommHook all_reduce(std::optional<ProcessGroup> group = {});

/// Sends gradients as float16, half the bytes, with less range. The backend paceline adds them in
/// float32 and rounds once.
PACELINE_API CommHook fp16_compress(std::optional<ProcessGroup> group = {});
/// The same as bfloat16, with less precision.
PACELINE_API CommHook bf16_compress(std::optional<ProcessGroup> group = {});

}  // namespace comm_hooks
}  // namespace paceline
