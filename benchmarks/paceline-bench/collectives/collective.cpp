#include "collectives/collective.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <memory>

#include "collectives/batch.h"
#include "collectives/mpi_libraries.h"
#include "collectives/streaming.h"
#include "measure/external_contender.h"
#include "measure/pinned_thread.h"

namespace paceline::bench {
namespace {

using BackendPointer = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

// What one call works on: some operations take the whole, others a part, too.
struct Buffers {
  Tensors whole;
  Tensors part;
  Tensors other;              // as large as the whole
  std::vector<Tensors> list;  // the whole's parts, on rank 0

  Buffers(const BackendPointer& backend, bool shared, std::int64_t bytes) {
    const std::int64_t ranks = get_world_size();
    const std::int64_t elements = std::max<std::int64_t>(bytes / 4 / ranks, 1);
    const auto make = [&](std::int64_t size) {
      const auto options = at::TensorOptions(at::kFloat);
      return shared ? backend->allocateTensor(size, options) : at::empty({size}, options);
    };
    whole = {make(std::max(bytes / 4, elements * ranks))};
    other = {make(whole[0].numel())};
    part = {make(elements)};
    if (get_rank() == 0) {
      auto& parts = list.emplace_back();
      for (std::int64_t r = 0; r < ranks; ++r) {
        parts.push_back(whole[0].slice(0, r * elements, (r + 1) * elements));
      }
    }
  }
  at::Tensor all_parts() { return whole[0].slice(0, 0, part[0].numel() * get_world_size()); }
  void refill() {
    for (const auto* tensors : {&whole, &part, &other}) tensors->front().fill_(1);
  }
};

// A caller that waits at once tells the backend so, as PyTorch does.
using Call = void (*)(c10d::Backend&, Buffers&);
const std::map<std::string, Call>& calls() {
  static const std::map<std::string, Call> table{
      {"all_reduce",
       [](auto& backend, auto& x) { backend.allreduce(x.whole, {.asyncOp = false})->wait(); }},
      {"reduce",
       [](auto& backend, auto& x) { backend.reduce(x.whole, {.asyncOp = false})->wait(); }},
      {"broadcast",
       [](auto& backend, auto& x) { backend.broadcast(x.whole, {.asyncOp = false})->wait(); }},
      {"all_gather",
       [](auto& backend, auto& x) {
         at::Tensor all = x.all_parts();
         backend.all_gather_single(all, x.part[0], {.asyncOp = false})->wait();
       }},
      {"reduce_scatter",
       [](auto& backend, auto& x) {
         at::Tensor all = x.all_parts();
         backend.reduce_scatter_single(x.part[0], all, {.asyncOp = false})->wait();
       }},
      {"gather",
       [](auto& backend, auto& x) { backend.gather(x.list, x.part, {.asyncOp = false})->wait(); }},
      {"scatter",
       [](auto& backend, auto& x) { backend.scatter(x.part, x.list, {.asyncOp = false})->wait(); }},
      {"all_to_all",
       [](auto& backend, auto& x) {
         at::Tensor all = x.all_parts();
         at::Tensor other = x.other[0].slice(0, 0, all.numel());
         std::vector<std::int64_t> even;
         backend.all_to_all_single(other, all, even, even, {.asyncOp = false})->wait();
       }},
      {"send_recv",
       [](auto& backend, auto& x) {
         const int size = get_world_size();
         const auto sent = backend.send(x.whole, (get_rank() + 1) % size, 0);
         backend.recv(x.other, (get_rank() + size - 1) % size, 0)->wait();
         sent->wait();
       }},
      {"barrier", [](auto& backend, auto&) {
         c10d::BarrierOptions options;
         options.asyncOp = false;
         backend.barrier(options)->wait();
       }}};
  return table;
}

BackendPointer backend_of(const ProcessGroup& group) {
  return group.c10d()->getBackend(c10::DeviceType::CPU);
}

Contender contender(std::string implementation, std::string variant, const std::string& name,
                    const BackendPointer& backend, std::int64_t bytes) {
  auto buffers = std::make_shared<std::vector<Buffers>>();
  for (int i = 0; i < calls_of(bytes); ++i) {
    buffers->emplace_back(backend, variant == "registered", bytes);
  }
  return {.implementation = std::move(implementation),
          .variant = std::move(variant),
          .prepare =
              [buffers] {
                for (Buffers& one : *buffers) one.refill();
              },
          .run =
              [buffers, backend, call = calls().at(name)] {
                for (Buffers& one : *buffers) call(*backend, one);
              },
          .calls = static_cast<int>(buffers->size())};
}

}  // namespace

Result measure_collective(const std::string& name, const std::optional<ProcessGroup>& gloo,
                          const std::vector<std::string>& mpi, std::int64_t bytes,
                          const RoundPlan& plan) {
  const BackendPointer ours = backend_of({});
  std::vector<Contender> contenders{contender("paceline", "registered", name, ours, bytes),
                                    contender("paceline", "unregistered", name, ours, bytes)};
  if (gloo) contenders.push_back(contender("gloo", "", name, backend_of(*gloo), bytes));
  for (const std::string& library : mpi) {
    if (!why_absent(library, get_world_size()).empty()) continue;
    contenders.push_back(external_contender(
        mpi_program(library, get_world_size(), name, std::to_string(bytes)), calls_of(bytes)));
  }
  if (name == "all_reduce") contenders.push_back(streaming(get_world_size(), bytes));
  // Not before: programs inherit it.
  const PinnedThread pinned(get_rank(), get_world_size());
  return {name, get_world_size(), bytes, measure(contenders, plan)};
}

}  // namespace paceline::bench
