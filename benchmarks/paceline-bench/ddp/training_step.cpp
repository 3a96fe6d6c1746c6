#include "ddp/training_step.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <torch/optim/sgd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <memory>

#include "benchmarks/c10d_reducer.h"
#include "measure/external_contender.h"

namespace paceline::bench {
namespace {

constexpr double kLearningRate = 1e-3;

// What every implementation trains: the same model on the same batch.
struct Trainee {
  explicit Trainee(const models::Model& model) {
    at::manual_seed(1);
    classifier = model.make();
    batch = models::make_batch(model);
    sgd = std::make_unique<torch::optim::SGD>(classifier->parameters(), kLearningRate);
  }

  std::shared_ptr<models::Classifier> classifier;
  models::Batch batch;
  std::unique_ptr<torch::optim::SGD> sgd;
};

template <typename Forward>
at::Tensor loss_of(const Trainee& trainee, Forward&& forward) {
  return at::cross_entropy_loss(forward(trainee.batch.input), trainee.batch.target);
}

template <typename Forward>
void train_step(Trainee& trainee, Forward&& forward, const std::function<void()>& synchronise) {
  trainee.sgd->zero_grad();
  loss_of(trainee, forward).backward();
  if (synchronise) synchronise();
  trainee.sgd->step();
}

Contender alone(const models::Model& model) {
  const auto trainee = std::make_shared<Trainee>(model);
  return {"none", "", {}, [trainee] {
            train_step(*trainee, [&](const auto& x) { return trainee->classifier->forward(x); },
                       {});
          }};
}

Contender with_barrier(const models::Model& model) {
  const auto trainee = std::make_shared<Trainee>(model);
  return {"barrier", "", {}, [trainee] {
            train_step(
                *trainee, [&](const auto& x) { return trainee->classifier->forward(x); },
                [] { barrier(); });
          }};
}

Contender with_ddp(std::string name, const models::Model& model, const ProcessGroup& group) {
  const auto trainee = std::make_shared<Trainee>(model);
  const auto ddp = std::make_shared<DistributedDataParallel<models::Classifier>>(
      trainee->classifier, DdpOptions{.process_group = group});
  return {std::move(name), "", {}, [trainee, ddp] { train_step(*trainee, *ddp, {}); }};
}

using Ddp = DistributedDataParallel<models::Classifier>;

Contender accumulating(const models::Model& model, int micro_batches) {
  const auto trainee = std::make_shared<Trainee>(model);
  const auto ddp = std::make_shared<Ddp>(trainee->classifier);
  return {"accumulation", "", {}, [=] {
            trainee->sgd->zero_grad();
            for (int micro = 0; micro < micro_batches; ++micro) {
              const auto guard = ddp->no_sync(micro + 1 < micro_batches);
              (loss_of(*trainee, *ddp) / micro_batches).backward();
            }
            trainee->sgd->step();
          }};
}

Contender with_logical_ranks(const models::Model& model, int micro_batches) {
  const auto trainee = std::make_shared<Trainee>(model);
  const auto ddp = std::make_shared<Ddp>(
      trainee->classifier, DdpOptions{.logical_ranks = micro_batches * get_world_size()});
  return {"logical_ranks", "", {}, [=] {
            trainee->sgd->zero_grad();
            for ([[maybe_unused]] const int rank : ddp->logical_ranks()) {
              loss_of(*trainee, *ddp).backward();
            }
            trainee->sgd->step();
          }};
}

Contender with_c10d_reducer(const models::Model& model, const ProcessGroup& group) {
  const auto trainee = std::make_shared<Trainee>(model);
  const auto ddp = std::make_shared<C10dReducerDdp>(trainee->classifier, group.c10d());
  return {"c10d_reducer_gloo", "", {}, [trainee, ddp] {
            train_step(*trainee, [&](const auto& x) { return ddp->forward(x); }, {});
          }};
}

// `wrapper`: the package whose DistributedDataParallel wraps the model.
Contender with_python(std::string name, const std::string& python, const std::string& backend,
                      const std::string& wrapper, const models::Model& model,
                      const std::vector<int>& node_processes) {
  return external_contender(
      {.name = std::move(name),
       .command = {python, beside_this_program("python_ddp.py"), backend, wrapper,
                   std::to_string(get_world_size()), std::to_string(at::get_num_threads()),
                   model.name, fmt::format("{}", fmt::join(node_processes, ","))},
       .remedy = "--python selects another Python"},
      1);
}

}  // namespace

Result measure_training_step(const OtherGroups& others, const models::Model& model,
                             const Options& options, const RoundPlan& plan) {
  std::vector<Contender> contenders{alone(model), with_barrier(model),
                                    with_ddp("paceline", model, {})};
  for (const auto& [backend, group] : others) {
    contenders.push_back(with_ddp(backend, model, group));
    if (backend == "gloo") contenders.push_back(with_c10d_reducer(model, group));
  }
  for (const std::string& backend : options.python_backends) {
    contenders.push_back(with_python("python_ddp_" + backend, options.python, backend, "torch",
                                     model, options.node_processes));
    if (backend == "paceline") {
      contenders.push_back(with_python("python_paceline_ddp", options.python, backend, "paceline",
                                       model, options.node_processes));
    }
  }
  return {"ddp", get_world_size(), model.name, measure(contenders, plan)};
}

Result measure_accumulation(const models::Model& model, int micro_batches, const RoundPlan& plan) {
  const std::vector contenders{accumulating(model, micro_batches),
                               with_logical_ranks(model, micro_batches)};
  return {"accumulation", get_world_size(), model.name, measure(contenders, plan)};
}

}  // namespace paceline::bench
