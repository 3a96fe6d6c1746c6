#include "topology/measure_topology.h"

#include <ATen/ATen.h>

#include <paceline/all_reduce_algorithms.h>
#include <paceline/collectives.h>

#include <functional>
#include <map>
#include <optional>

#include "measure/gather_records.h"
#include "nodes/rate.h"
#include "topology/link_counters.h"
#include "topology/theory.h"

namespace paceline::bench {
namespace {

// Counts what a call sends and receives; all_reduce does not.
using Algorithm = std::function<std::optional<Traffic>(const at::Tensor&, const ProcessGroup&)>;

const std::map<std::string, Algorithm>& algorithms() {
  static const std::map<std::string, Algorithm> table{
      {"all_reduce",
       [](const at::Tensor& x, const ProcessGroup& /*messages*/) {
         all_reduce(x);
         return std::nullopt;
       }},
      {"ring", [](auto& x, auto& group) { return ring_all_reduce(x, {.group = group}); }},
      {"naive", [](auto& x, auto& group) { return naive_all_reduce(x, {.group = group}); }},
      {"parameter_server",
       [](auto& x, auto& group) { return parameter_server_all_reduce(x, 1, {.group = group}); }},
      {"sharded_server", [](auto& x, auto& group) {
         return parameter_server_all_reduce(x, get_world_size(), {.group = group});
       }}};
  return table;
}

// One call beside the timed ones. Barriers are around it, since a message that was sent may still
// be on its way.
void count(Series& series, const at::Tensor& tensor, const ProcessGroup& messages, bool has_link) {
  barrier();
  const LinkBytes before = has_link ? read_counters() : LinkBytes{};
  const auto traffic = algorithms().at(series.implementation)(tensor, messages);
  barrier();
  const LinkBytes after = has_link ? read_counters() : LinkBytes{};
  if (traffic) {
    series.payload = gather_record(Payload{traffic->bytes_sent, traffic->bytes_received,
                                           traffic->messages_sent, traffic->messages_received});
  }
  if (has_link) {
    series.link =
        gather_record(LinkBytes{after.sent - before.sent, after.received - before.received});
  }
}

}  // namespace

Result measure_topology(const Options& options, const RoundPlan& plan) {
  const std::int64_t bytes = options.bytes.front();
  const at::Tensor tensor = at::empty({bytes / 4});
  const ProcessGroup messages =
      has_links(options) ? new_group({}, {.backend = "gloo"}) : ProcessGroup();
  std::vector<Contender> contenders;
  for (const std::string& name : options.algorithms) {
    const auto run = [tensor, messages, algorithm = algorithms().at(name)] {
      static_cast<void>(algorithm(tensor, messages));
    };
    contenders.push_back({name, "", [tensor] { tensor.fill_(1); }, run});
  }
  Result result{"topology", get_world_size(), bytes, measure(contenders, plan)};
  for (Series& one : result.series) {
    count(one, tensor, messages, has_links(options));
    if (!has_links(options)) continue;
    const double rate = bytes_per_second(options.link);
    one.theory_us = theory_of(one.implementation, get_world_size(), bytes, rate).us;
  }
  return result;
}

}  // namespace paceline::bench
