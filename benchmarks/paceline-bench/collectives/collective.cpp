#include "collectives/collective.h"

#include <ATen/ATen.h>

#include <paceline/collectives.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>

#include "collectives/batch.h"
#include "collectives/mpi_libraries.h"
#include "collectives/single_copy.h"
#include "collectives/streaming.h"
#include "measure/external_contender.h"
#include "measure/pinned_thread.h"
#include "nodes/link.h"

namespace paceline::bench {
namespace {

// What one call works on: some operations take the whole, others a part, too.
struct Buffers {
  at::Tensor whole;
  at::Tensor part;
  at::Tensor other;  // as large as the whole
  at::Tensor all_parts;
  at::Tensor other_parts;
  std::vector<at::Tensor> list;  // the whole's parts, on rank 0

  Buffers(bool registered, std::int64_t bytes) {
    const std::int64_t ranks = get_world_size();
    const std::int64_t elements = std::max<std::int64_t>(bytes / 4 / ranks, 1);
    const auto make = [&](std::int64_t size) {
      return registered ? allocate_tensor({size}) : at::empty({size});
    };
    whole = make(std::max(bytes / 4, elements * ranks));
    other = make(whole.numel());
    part = make(elements);
    all_parts = whole.slice(0, 0, elements * ranks);
    other_parts = other.slice(0, 0, elements * ranks);
    if (get_rank() == 0) list = all_parts.split(elements);
  }
  void refill() {
    for (const at::Tensor& tensor : {whole, part, other}) tensor.fill_(1);
  }
};

using Call = void (*)(const ProcessGroup&, Buffers&);
const std::map<std::string, Call>& calls() {
  static const std::map<std::string, Call> table{
      {"all_reduce", [](auto& group, auto& x) { all_reduce(x.whole, {.group = group}); }},
      {"reduce", [](auto& group, auto& x) { reduce(x.whole, {.group = group}); }},
      {"broadcast", [](auto& group, auto& x) { broadcast(x.whole, {.group = group}); }},
      {"all_gather",
       [](auto& group, auto& x) { all_gather_into_tensor(x.all_parts, x.part, {.group = group}); }},
      {"reduce_scatter",
       [](auto& group, auto& x) { reduce_scatter_tensor(x.part, x.all_parts, {.group = group}); }},
      {"gather", [](auto& group, auto& x) { gather(x.part, x.list, {.group = group}); }},
      {"scatter", [](auto& group, auto& x) { scatter(x.part, x.list, {.group = group}); }},
      {"all_to_all",
       [](auto& group, auto& x) {
         all_to_all_single(x.other_parts, x.all_parts, {.group = group});
       }},
      {"send_recv",
       [](auto& group, auto& x) {
         const int size = get_world_size();
         Work sent = send_async(x.whole, (get_rank() + 1) % size, {.group = group});
         recv(x.other, {.src = (get_rank() + size - 1) % size, .group = group});
         sent.wait();
       }},
      {"barrier", [](auto& group, auto&) { barrier({.group = group}); }}};
  return table;
}

Contender contender(std::string implementation, std::string variant, const std::string& name,
                    const ProcessGroup& group, std::int64_t bytes) {
  auto buffers = std::make_shared<std::vector<Buffers>>();
  for (int i = 0; i < calls_of(bytes); ++i) buffers->emplace_back(variant == "registered", bytes);
  return {.implementation = std::move(implementation),
          .variant = std::move(variant),
          .prepare =
              [buffers] {
                for (Buffers& one : *buffers) one.refill();
              },
          .run =
              [buffers, group, call = calls().at(name)] {
                for (Buffers& one : *buffers) call(group, one);
              },
          .calls = static_cast<int>(buffers->size())};
}

}  // namespace

Result measure_collective(const std::string& name, const OtherGroups& others,
                          const Options& options, std::int64_t bytes, const RoundPlan& plan) {
  std::vector<Contender> contenders{contender("paceline", "registered", name, {}, bytes),
                                    contender("paceline", "unregistered", name, {}, bytes)};
  if (options.nodes == 1 && (name == "scatter" || name == "all_to_all")) {
    const auto with = [&](const char* variant, std::size_t single_copy_bytes) {
      const PacelineOptions copies{.single_copy_bytes = single_copy_bytes};
      const ProcessGroup group = new_group({}, {.backend_options = copies});
      contenders.push_back(contender("paceline", variant, name, group, bytes));
    };
    with("one copy", 1);
    with("two copies", std::numeric_limits<std::size_t>::max());
  }
  for (const auto& [backend, group] : others) {
    contenders.push_back(contender(backend, "", name, group, bytes));
  }
  for (const std::string& library : options.mpi) {
    if (!why_absent(library, get_world_size()).empty()) continue;
    contenders.push_back(external_contender(
        mpi_program(library, get_world_size(), name, std::to_string(bytes)), calls_of(bytes)));
  }
  if (options.nodes > 1) {
    if (name == "all_reduce") contenders.push_back(link(options.nodes, bytes));
  } else {
    if (name == "all_reduce") contenders.push_back(streaming(get_world_size(), bytes));
    if (auto one = single_copy(name, bytes)) contenders.push_back(std::move(*one));
  }
  // Not before: programs inherit it.
  const PinnedThread pinned(get_rank(), get_world_size());
  return {name, get_world_size(), bytes, measure(contenders, plan)};
}

}  // namespace paceline::bench
