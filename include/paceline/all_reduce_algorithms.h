#pragma once

/// @file
/// The textbook's algorithms for an all-reduce, over the messages of any backend, with their
/// traffic counted. all_reduce is faster. These show what an algorithm costs, on a network of
/// choice: `paceline bench topology` measures them, and docs/collectives.md has the results.
///
/// **Calls** are collective and blocking, and do nothing on ranks that are not members of the
/// group. Types and operations are those of all_reduce on the backend paceline. Tensors are dense
/// and on the CPU. The result has the same bits on every rank. Each addition rounds to the type of
/// the tensor, as partial sums travel in it; all_reduce rounds 16-bit floats only once. AVG divides
/// the sum. After an error the values of the tensor are undefined.
///
/// **Messages** have the tag 32767. Do not use it for messages of your own that run beside.
///
/// **Errors.** Before the first message the ranks compare their calls, by one all_gather_bytes of a
/// line of text that Traffic does not count; Mismatch if they differ. Otherwise as send and recv,
/// where the group's timeout is for each half of an algorithm: the sums, and their way back.

#include <ATen/core/Tensor.h>

#include <paceline/api.h>
#include <paceline/collectives.h>

#include <cstdint>

namespace paceline {

/// What this rank has sent and received in a call: the elements of tensors, without the headers of
/// a backend or a network. An empty part sends no message.
struct Traffic {
  std::int64_t bytes_sent = 0;         ///< To all other ranks together.
  std::int64_t bytes_received = 0;     ///< From all other ranks together.
  std::int64_t messages_sent = 0;      ///< The number of sends.
  std::int64_t messages_received = 0;  ///< The number of receives.
};

/// All-reduce around a ring: each rank only sends to the next and receives from the one before (P.
/// Patarasuk, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, JPDC
/// 69, 2009). The tensor is cut into W chunks, whose sizes differ by one element at most. In W - 1
/// steps each chunk travels around the ring and is added up, in W - 1 more the sums travel around.
///
/// For K bytes, each rank sends and receives 2 (W - 1) / W K bytes, up to two elements, in 2 (W -
/// 1) messages; all ranks together exactly 2 (W - 1) K bytes. A rank needs memory for another
/// tensor.
PACELINE_API Traffic ring_all_reduce(const at::Tensor& tensor,
                                     const AllReduceOptions& options = {});

/// All-reduce over one rank: every rank sends its tensor to rank 0 of the group, which adds them in
/// the order of ranks and sends the result back.
///
/// For K bytes, rank 0 sends and receives (W - 1) K bytes, each other rank K. Rank 0 needs memory
/// for the tensors of all ranks.
PACELINE_API Traffic naive_all_reduce(const at::Tensor& tensor,
                                      const AllReduceOptions& options = {});

/// All-reduce over parameter servers: the tensor is cut into `servers` shards, whose sizes differ
/// by one element at most, and rank s of the group keeps shard s. Every other rank pushes its part
/// of each shard and pulls the sum. A server adds the parts of other ranks to its own in the order
/// of ranks, and needs memory for all of them.
///
/// For K bytes, a server sends and receives K + (W - 2) K / `servers` bytes, each other rank K, up
/// to the rounding of shards; all ranks together exactly 2 (W - 1) K. One server makes this
/// naive_all_reduce; W servers a direct reduce-scatter and all-gather, with the bytes of the ring.
///
/// Throws UsageError unless `servers` is from 1 to W.
PACELINE_API Traffic parameter_server_all_reduce(const at::Tensor& tensor, int servers,
                                                 const AllReduceOptions& options = {});

}  // namespace paceline
