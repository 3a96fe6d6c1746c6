#include "ddp/training_step.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>

#include "benchmarks/c10d_reducer.h"
#include "measure/external_peer.h"

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
void train_step(Trainee& trainee, Forward&& forward, const std::function<void()>& synchronise) {
  trainee.sgd->zero_grad();
  at::cross_entropy_loss(forward(trainee.batch.input), trainee.batch.target).backward();
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

Contender with_c10d_reducer(const models::Model& model, const ProcessGroup& group) {
  const auto trainee = std::make_shared<Trainee>(model);
  const auto ddp = std::make_shared<C10dReducerDdp>(trainee->classifier, group.c10d());
  return {"c10d_reducer_gloo", "", {}, [trainee, ddp] {
            train_step(*trainee, [&](const auto& x) { return ddp->forward(x); }, {});
          }};
}

Contender with_python(const std::string& python, const std::string& backend,
                      const models::Model& model) {
  return external_contender("python_ddp_" + backend, 1, [&] {
    return std::vector<std::string>{python,
                                    beside_this_program("python_ddp.py"),
                                    backend,
                                    std::to_string(get_world_size()),
                                    std::to_string(at::get_num_threads()),
                                    model.name};
  });
}

}  // namespace

Result measure_training_step(const std::optional<ProcessGroup>& gloo, const models::Model& model,
                             const Options& options, const RoundPlan& plan) {
  std::vector<Contender> contenders{alone(model), with_barrier(model),
                                    with_ddp("paceline", model, {})};
  if (gloo) {
    contenders.push_back(with_ddp("gloo", model, *gloo));
    contenders.push_back(with_c10d_reducer(model, *gloo));
  }
  for (const std::string& backend : options.python_backends) {
    contenders.push_back(with_python(options.python, backend, model));
  }
  return {"ddp", get_world_size(), model.name, measure(contenders, plan)};
}

}  // namespace paceline::bench
