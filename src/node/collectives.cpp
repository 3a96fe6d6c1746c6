// The algorithms of Group. One rule makes them safe, whatever follows what: what a rank publishes
// with a step is read by others before their next step, and a buffer published with a step is
// written again for the next but one at the earliest.

#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "node/group.h"
#include "node/kernels.h"

namespace paceline::node {
namespace {

// Up to here every rank reduces everything itself, and a second step costs more than that.
constexpr std::size_t kSmallBytes = std::size_t{32} << 10;

void copy_bytes(void* target, const void* source, std::size_t bytes) {
  if (bytes > 0 && target != source) std::memcpy(target, source, bytes);
}

const std::byte* advance(const void* pointer, std::size_t bytes) {
  return static_cast<const std::byte*>(pointer) + bytes;
}
std::byte* advance(void* pointer, std::size_t bytes) {
  return static_cast<std::byte*>(pointer) + bytes;
}

void check_reducible(const char* operation, DataType type, ReduceOp op) {
  if (!is_reducible(type) || (type == DataType::int64 && op == ReduceOp::avg)) {
    throw UsageError(
        fmt::format("{} of {} with {}: float32, float64, bfloat16 and int64 can be reduced, int64 "
                    "not with AVG",
                    operation, name(type), name(op)));
  }
}

}  // namespace

void Group::barrier() {
  begin(Kind::barrier, 0, DataType::byte, ReduceOp::sum, 0);
  first_step();
}

void Group::broadcast(void* data, std::size_t count, DataType type, int root) {
  if (root < 0 || root >= size()) {
    throw UsageError(
        fmt::format("broadcast from rank {}: the group has ranks 0 to {}", root, size() - 1));
  }
  begin(Kind::broadcast, count, type, ReduceOp::sum, root);
  if (size() == 1) return;
  const std::size_t bytes = count * element_size(type);
  const std::size_t chunk = region_->options().staging_bytes;
  const bool mine = rank() == root;
  if (mine) copy_bytes(region_->input(rank(), step_ + 1), data, std::min(bytes, chunk));
  first_step(bytes > chunk && mine ? offset_of(data, bytes) : Call::kNotShared);

  if (bytes > chunk) {
    if (const std::byte* const source = resolve_or_fail(root, bytes)) {
      if (!mine) copy_bytes(data, source, bytes);
      return step();  // the root may change it again
    }
  }
  for (std::size_t done = 0;;) {
    const std::size_t now = std::min(bytes - done, chunk);
    if (!mine) copy_bytes(advance(data, done), input_of(root), now);
    done += now;
    if (done == bytes) return;
    if (mine) {
      copy_bytes(region_->input(rank(), step_ + 1), advance(data, done),
                 std::min(bytes - done, chunk));
    }
    step();
  }
}

void Group::all_reduce(const void* input, void* output, std::size_t count, DataType type,
                       ReduceOp op) {
  check_reducible("all_reduce", type, op);
  begin(Kind::all_reduce, count, type, op, 0);
  const std::size_t bytes = count * element_size(type);
  if (size() == 1) return copy_bytes(output, input, bytes);
  if (bytes <= std::min(kSmallBytes, region_->options().staging_bytes)) {
    return all_reduce_small(input, output);
  }
  first_step(input == output ? offset_of(output, bytes) : Call::kNotShared);
  const auto tensors = shared_tensors(bytes);
  if (tensors.empty()) {
    all_reduce_staged(input, output);
  } else {
    all_reduce_shared(tensors);
  }
}

void Group::all_reduce_small(const void* input, void* output) {
  const auto type = static_cast<DataType>(call_.type);
  copy_bytes(region_->input(rank(), step_ + 1), input, call_.count * element_size(type));
  first_step();
  std::array<const void*, kMaxRanks> sources;
  for (int peer = 0; peer < size(); ++peer)
    sources[static_cast<std::size_t>(peer)] = input_of(peer);
  reduce(type, static_cast<ReduceOp>(call_.op),
         std::span(sources).first(static_cast<std::size_t>(size())), {&output, 1}, call_.count);
}

// Each rank reduces its slice of all tensors into all tensors.
void Group::all_reduce_shared(std::span<void* const> tensors) {
  const auto type = static_cast<DataType>(call_.type);
  const Slice slice = slice_of(call_.count, element_size(type), rank(), size());
  std::vector<void*> parts;
  for (void* const tensor : tensors) {
    parts.push_back(advance(tensor, slice.begin * element_size(type)));
  }
  reduce(type, static_cast<ReduceOp>(call_.op), {parts.data(), parts.size()}, parts, slice.count());
  step();
}

// A pipeline of chunks: while chunk t is copied in, chunk t-1 is reduced, slice by slice, and chunk
// t-2 is copied out, so that each chunk costs one step. A rank's own slice does not pass through
// its staging buffers on the way in nor on the way out.
void Group::all_reduce_staged(const void* input, void* output) {
  const auto type = static_cast<DataType>(call_.type);
  const auto op = static_cast<ReduceOp>(call_.op);
  const std::size_t element = element_size(type);
  const std::size_t bytes = call_.count * element;
  const std::size_t chunk = region_->options().staging_bytes;
  const std::size_t chunks = (bytes + chunk - 1) / chunk;
  // The bytes of chunk t that rank `peer` reduces, counted from the chunk's begin.
  const auto slice = [&](std::size_t t, int peer) {
    const Slice part =
        slice_of(std::min(chunk, bytes - t * chunk) / element, element, peer, size());
    return Slice{part.begin * element, part.end * element};
  };
  std::vector<const void*> sources(static_cast<std::size_t>(size()));

  for (std::size_t t = 0; t < chunks + 2; ++t) {
    for (int peer = 0; t < chunks && peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Slice part = slice(t, peer);
      copy_bytes(region_->input(rank(), step_ + 1) + part.begin,
                 advance(input, t * chunk + part.begin), part.count());
    }
    if (t >= 1 && t <= chunks) {
      const Slice part = slice(t - 1, rank());
      const std::size_t offset = (t - 1) * chunk + part.begin;
      for (int peer = 0; peer < size(); ++peer) {
        sources[static_cast<std::size_t>(peer)] =
            peer == rank() ? advance(input, offset) : input_of(peer) + part.begin;
      }
      void* const results[] = {region_->output(rank(), step_ + 1) + part.begin,
                               advance(output, offset)};
      reduce(type, op, sources, results, part.count() / element);
    }
    for (int peer = 0; t >= 2 && peer < size(); ++peer) {
      if (peer == rank()) continue;
      const Slice part = slice(t - 2, peer);
      copy_bytes(advance(output, (t - 2) * chunk + part.begin),
                 region_->output(peer, step_) + part.begin, part.count());
    }
    if (t <= chunks) step();
  }
}

void Group::all_gather(const void* input, std::span<void* const> outputs, std::size_t count,
                       DataType type) {
  begin(Kind::all_gather, count, type, ReduceOp::sum, 0);
  const std::size_t bytes = count * element_size(type);
  if (size() == 1) return copy_bytes(outputs[0], input, bytes);
  const std::size_t chunk = region_->options().staging_bytes;
  copy_bytes(region_->input(rank(), step_ + 1), input, std::min(bytes, chunk));
  first_step(bytes > chunk ? offset_of(input, bytes) : Call::kNotShared);

  if (bytes > chunk) {
    const auto tensors = shared_tensors(bytes);
    for (std::size_t peer = 0; peer < tensors.size(); ++peer) {
      copy_bytes(outputs[peer], tensors[peer], bytes);
    }
    if (!tensors.empty()) return step();  // the inputs may be changed again
  }
  for (std::size_t done = 0;;) {
    const std::size_t now = std::min(bytes - done, chunk);
    for (int peer = 0; peer < size(); ++peer) {
      const void* const source = peer == rank() ? advance(input, done) : input_of(peer);
      copy_bytes(advance(outputs[static_cast<std::size_t>(peer)], done), source, now);
    }
    done += now;
    if (done == bytes) return;
    copy_bytes(region_->input(rank(), step_ + 1), advance(input, done),
               std::min(bytes - done, chunk));
    step();
  }
}

void Group::reduce_scatter(std::span<const void* const> inputs, void* output, std::size_t count,
                           DataType type, ReduceOp op) {
  check_reducible("reduce_scatter", type, op);
  begin(Kind::reduce_scatter, count, type, op, 0);
  const auto ranks = static_cast<std::size_t>(size());
  const std::size_t element = element_size(type);
  const std::size_t bytes = count * element;
  if (size() == 1) return copy_bytes(output, inputs[0], bytes);
  // Every rank's part of the staging buffer, a whole number of cache lines.
  const std::size_t piece =
      std::max(region_->options().staging_bytes / ranks / kCacheLine, std::size_t{1}) * kCacheLine;
  std::vector<const void*> sources(ranks);

  const auto copy_in = [&](std::size_t done) {
    std::byte* const buffer = region_->input(rank(), step_ + 1);
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      copy_bytes(buffer + peer * piece, advance(inputs[peer], done), std::min(bytes - done, piece));
    }
  };
  copy_in(0);
  first_step();
  for (std::size_t done = 0;;) {
    const std::size_t now = std::min(bytes - done, piece);
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      sources[peer] = input_of(static_cast<int>(peer)) + static_cast<std::size_t>(rank()) * piece;
    }
    void* const target = advance(output, done);
    reduce(type, op, sources, {&target, 1}, now / element);
    done += now;
    if (done == bytes) return;
    copy_in(done);
    step();
  }
}

}  // namespace paceline::node
