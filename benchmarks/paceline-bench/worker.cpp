#include "worker.h"

#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/record.h>

#include "base/environment.h"
#include "collectives/collective.h"
#include "ddp/training_step.h"
#include "nodes/network.h"
#include "topology/measure_topology.h"

namespace paceline::bench {
namespace {

using namespace std::chrono_literals;

// The backend mpi needs ranks that its mpirun has started.
bool has_mpi() {
  const auto& launched = base::environment().launched;
  return is_mpi_available() && launched && launched->launcher.starts_with("mpirun");
}

void run(const Options& options, const std::function<OnResult()>& begin) {
  at::set_num_threads(options.threads);
  const auto world = init_process_group();
  const OnResult on_result = get_rank() == 0 ? begin() : [](const Result&) {};
  if (options.benchmark == Benchmark::launch) return barrier();
  if (options.benchmark == Benchmark::topology) {
    const auto length = has_links(options) ? 0ms : options.quick ? 2ms : 5ms;
    return on_result(measure_topology(options, {options.rounds, length}));
  }
  OtherGroups others;
  if (is_gloo_available()) others.emplace("gloo", new_group({}, {.backend = "gloo"}));
  if (has_mpi()) others.emplace("mpi", new_group({}, {.backend = "mpi"}));
  if (options.benchmark == Benchmark::collectives) {
    const RoundPlan plan{options.rounds, options.quick ? 2ms : 5ms};
    for (const auto& name : options.collectives) {
      for (const auto bytes : name == "barrier" ? std::vector<std::int64_t>{4} : options.bytes) {
        if (name == "send_recv" && get_world_size() == 1) continue;
        on_result(measure_collective(name, others, options, bytes, plan));
      }
    }
  } else {
    // Steps in a row, as in training: the first finds caches and cores as another contender left
    // them.
    const RoundPlan plan{options.rounds, options.quick ? 2ms : 250ms};
    for (const auto& name : options.models) {
      const models::Model& model = *models::find_model(name);
      on_result(options.micro_batches > 0 ? measure_accumulation(model, options.micro_batches, plan)
                                          : measure_training_step(others, model, options, plan));
    }
  }
}

}  // namespace

int run_worker(const Options& options, const std::function<OnResult()>& begin) {
  if (!options.node_processes.empty()) enter_node(options.node_processes);
  return record([&] { run(options, begin); });
}

}  // namespace paceline::bench
