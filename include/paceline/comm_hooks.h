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

/// A bucket of gradients: getIndex, getBuffer (flat; in registered memory, if the backend has
/// such), getGradients, getParameters, isLast, setBuffer.
using GradBucket = c10d::GradBucket;

/// Communicates a bucket in place of DistributedDataParallel; see register_comm_hook. It starts the
/// communication and returns a future of the bucket's new contents: a tensor of the bucket's size,
/// either the bucket itself or another. The hook must average: all ranks return the same contents,
/// or a later comparison of the models throws Mismatch.
/// Every rank calls it for the same buckets in the same order, on the thread of the backward. Keep
/// state in the function object.
///
/// Complete every future, also if the hook fails. If a future is not complete within the group's
/// timeout, the step throws Timeout that names this rank. The time counts from the end of the last
/// call that the future may depend on. Calls that start more than one timeout after the end of the
/// backward do not count.
using CommHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&)>;

namespace detail {
PACELINE_API std::shared_ptr<c10d::CommHookInterface> make_comm_hook(CommHook hook);
}

namespace comm_hooks {

/// Averages as DistributedDataParallel does without a hook, by one collective for each bucket. A
/// building block for custom hooks.
///
/// `group`, here and below: the ranks to average over. Unset: the process_group of the
/// model that runs the hook. A custom hook then must call this one before it returns, on the thread
/// that it was called on; on another thread this throws UsageError.
PACELINE_API CommHook all_reduce(std::optional<ProcessGroup> group = {});

/// Sends gradients as float16, half the bytes, with less range. The backend paceline adds them in
/// float32 and rounds once.
PACELINE_API CommHook fp16_compress(std::optional<ProcessGroup> group = {});
/// The same as bfloat16, with less precision.
PACELINE_API CommHook bf16_compress(std::optional<ProcessGroup> group = {});

/// Divides gradients by `factor` before it adds them up, and multiplies the sum by `factor` over
/// the number of ranks, so that sums in float16 stay in its range. Apex's
/// gradient_predivide_factor. Throws UsageError unless the factor is positive and finite.
PACELINE_API CommHook predivided_all_reduce(double factor, std::optional<ProcessGroup> group = {});

/// Has `hook` communicate the bucket as float16, and converts the result back:
/// `fp16_compress_wrapper(power_sgd(state))`. Throws UsageError for a null hook; so do the next
/// two.
PACELINE_API CommHook fp16_compress_wrapper(CommHook hook);
/// The same as bfloat16.
PACELINE_API CommHook bf16_compress_wrapper(CommHook hook);
/// The same as float32, for 16-bit gradients over a backend that adds them in 16 bits. Apex's
/// allreduce_always_fp32.
PACELINE_API CommHook fp32_wrapper(CommHook hook);

}  // namespace comm_hooks
}  // namespace paceline
