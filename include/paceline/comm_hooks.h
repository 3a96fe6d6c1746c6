#pragma once

#include <ATen/core/ivalue.h>

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <functional>
#include <memory>

// Declared only, as their header costs every source file seconds: hooks of your own include
// <torch/csrc/distributed/c10d/comm.hpp>.
namespace c10d {
class GradBucket;
class CommHookInterface;
}  // namespace c10d

namespace paceline {

// A bucket of gradients: getIndex, getBuffer (flat, its memory shared between the ranks where the
// backend has such), getGradients, getParameters, isLast, setBuffer.
using GradBucket = c10d::GradBucket;

// Communicates a bucket in place of DistributedDataParallel, see register_comm_hook. It is called
// on every rank for the same buckets in the same order, on the thread of the backward, and starts
// the communication; the future holds the tensor that the gradients are then to be, as large as
// the bucket: itself, or another. What averaging there is, the hook does. State belongs to the
// function object. Each future must be completed, also if the hook fails; one that is not, the
// group's timeout after the last call that it may depend on, is a Timeout that names its rank. Calls
// made more than that time after the end of the backward are none of those.
using CommHook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&)>;

namespace detail {
PACELINE_API std::shared_ptr<c10d::CommHookInterface> make_comm_hook(CommHook hook);
}

namespace comm_hooks {

// What DistributedDataParallel does without a hook, by one collective a bucket. Something to build
// hooks of one's own on.
PACELINE_API CommHook all_reduce(ProcessGroup group = {});

// Gradients travel as 16-bit floats, half the bytes. On the backend paceline they are added up in
// float32 and rounded once. float16 has less range, bfloat16 less precision.
PACELINE_API CommHook fp16_compress(ProcessGroup group = {});
PACELINE_API CommHook bf16_compress(ProcessGroup group = {});

}  // namespace comm_hooks
}  // namespace paceline
