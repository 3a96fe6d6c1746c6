#include "worker.h"

#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/record.h>

#include <cstdio>

#include "collectives/collective.h"
#include "ddp/training_step.h"
#include "nodes/network.h"

namespace paceline::bench {
namespace {

using namespace std::chrono_literals;

void send(const Result& result) {
  if (get_rank() != 0) return;
  const std::string line = to_line(result);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

void run(const Options& options) {
  at::set_num_threads(options.threads);
  const auto world = init_process_group();
  if (options.benchmark == Benchmark::launch) return barrier();
  std::optional<ProcessGroup> gloo;
  if (is_gloo_available()) gloo = new_group({}, {.backend = "gloo"});

  if (options.benchmark == Benchmark::collectives) {
    const RoundPlan plan{options.rounds, options.quick ? 2ms : 5ms};
    for (const auto& name : options.collectives) {
      for (const auto bytes : name == "barrier" ? std::vector<std::int64_t>{4} : options.bytes) {
        if (name == "send_recv" && get_world_size() == 1) continue;
        send(measure_collective(name, gloo, options, bytes, plan));
      }
    }
  } else {
    // Steps in a row, as in training: the first finds caches and cores as another contender left
    // them.
    const RoundPlan plan{options.rounds, options.quick ? 2ms : 250ms};
    for (const auto& name : options.models) {
      const models::Model& model = *models::find_model(name);
      send(options.micro_batches > 0 ? measure_accumulation(model, options.micro_batches, plan)
                                     : measure_training_step(gloo, model, options, plan));
    }
  }
}

}  // namespace

int run_worker(const Options& options) {
  if (options.nodes > 1) enter_node(options.node_processes);
  return record([&] { run(options); });
}

}  // namespace paceline::bench
