// A rank of benchmarks/resnet50/run: trains ResNet-50 on synthetic images and times each iteration.

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/device.h>
#include <paceline/distributed.h>
#include <paceline/record.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/c10d_reducer.h"
#include "benchmarks/paceline-bench/measure/gather_records.h"
#include "models/models.h"
#include "models/resnet.h"

namespace {

using namespace paceline;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kClasses = 1000;
constexpr double kLearningRate = 1e-3;

struct Options {
  std::vector<std::string> modes{"none", "paceline", "torch"};
  std::int64_t batch_size = 8;
  std::int64_t image_size = 64;
  int iterations = 10;
  int warm_up = 3;  // buckets are rebuilt after the first step
  std::string device = "cpu";
  std::string backend = "paceline";
};

struct Times {  // in milliseconds
  double total = 0;
  double forward = 0;
  double backward = 0;
};

// Moments of a step on the device that computes it. The CPU runs ahead of a CUDA device, whose
// events have the times.
class Moments {
 public:
  explicit Moments(at::Device device) : device_(device) {}

  void record() {
    clock_.push_back(Clock::now());
    if (device_.is_cpu()) return;
    events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  // Call after the last moment.
  void wait() const {
    if (!device_.is_cpu()) events_.back().synchronize();
  }
  double milliseconds(std::size_t from, std::size_t to) const {
    if (!device_.is_cpu()) return events_[from].elapsedTime(events_[to]);
    return std::chrono::duration<double, std::milli>(clock_[to] - clock_[from]).count();
  }

 private:
  at::Device device_;
  std::vector<Clock::time_point> clock_;
  std::vector<c10::Event> events_;
};

using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

Forward make_forward(const std::string& mode, std::shared_ptr<models::Classifier> model) {
  if (mode == "paceline" || mode == "delayed") {
    DdpOptions ddp_options;
    if (mode == "delayed") {
      ddp_options.bucket_cap_mb = std::numeric_limits<double>::infinity();
      ddp_options.zero_copy = false;
    }
    auto ddp = std::make_shared<DistributedDataParallel<models::Classifier>>(std::move(model),
                                                                             ddp_options);
    return [ddp](const auto& x) { return (*ddp)(x); };
  }
  if (mode == "torch") {
    const ProcessGroup gloo = new_group({}, {.backend = "gloo"});
    auto ddp = std::make_shared<bench::C10dReducerDdp>(std::move(model), gloo.c10d());
    return [ddp](const auto& x) { return ddp->forward(x); };
  }
  return [model = std::move(model)](const auto& x) { return model->forward(x); };
}

// Trains a model of its own. Construction is collective, and so are steps of paceline and torch.
class Trainer {
 public:
  Trainer(const std::string& mode, at::Device device)
      : mode_(mode),
        device_(device),
        model_(on(device)),
        forward_(make_forward(mode, model_.ptr())),
        sgd_(model_->parameters(), kLearningRate) {}

  const std::string& mode() const { return mode_; }

  Times step(const models::Batch& batch) {
    Moments moments(device_);
    moments.record();
    sgd_.zero_grad();
    moments.record();
    const torch::Tensor loss = at::cross_entropy_loss(forward_(batch.input), batch.target);
    moments.record();
    loss.backward();
    moments.record();
    sgd_.step();
    moments.record();
    moments.wait();
    return {moments.milliseconds(0, 4), moments.milliseconds(1, 2), moments.milliseconds(2, 3)};
  }

 private:
  static models::ResNet50 on(at::Device device) {
    models::ResNet50 model{kClasses};
    model->to(device);
    return model;
  }

  std::string mode_;
  at::Device device_;
  models::ResNet50 model_;
  Forward forward_;
  torch::optim::SGD sgd_;
};

// Those of the rank that took longest.
Times slowest(const Times& mine) {
  Times result = mine;
  for (const Times& theirs : bench::gather_record(mine)) {
    if (theirs.total > result.total) result = theirs;
  }
  return result;
}

Times measure(Trainer& trainer, const models::Batch& batch) {
  barrier();
  // The other ranks sleep meanwhile.
  const bool idle = trainer.mode() == "alone" && get_rank() != 0;
  return slowest(idle ? Times{} : trainer.step(batch));
}

// What the tensors of this process use of a CUDA device, in bytes.
std::int64_t allocated(at::Device device) {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes[kAll]
      .current;
}

// Makes the trainers. On a CUDA device, prints what each uses of it between steps.
std::vector<Trainer> make_trainers(const std::vector<std::string>& modes, at::Device device,
                                   const models::Batch& batch) {
  std::vector<Trainer> trainers;
  if (device.is_cpu()) {
    for (const std::string& mode : modes) trainers.emplace_back(mode, device);
    return trainers;
  }
  Trainer("none", device).step(batch);  // what LibTorch allocates once
  for (const std::string& mode : modes) {
    const std::int64_t before = allocated(device);
    trainers.emplace_back(mode, device);
    // Buckets are rebuilt after the first.
    for (int i = 0; i < 2; ++i) measure(trainers.back(), batch);
    if (get_rank() != 0) continue;
    std::printf("%-8s memory of the device %8.1f MB\n", mode.c_str(),
                static_cast<double>(allocated(device) - before) / 1e6);
  }
  return trainers;
}

// The modes take turns, iteration by iteration, so that what slows down the machine for a while
// slows down all of them; the order changes.
void train(const Options& options) {
  const at::Device device = options.device == "cuda" ? local_device() : at::Device(at::kCPU);
  if (options.device == "cuda" && device.is_cpu()) {
    throw UsageError("--device cuda: this rank would use " + describe_local_device());
  }
  const auto world = init_process_group({.backend = options.backend});
  at::manual_seed(static_cast<std::uint64_t>(get_rank()));
  const std::int64_t size = options.image_size;
  const models::Batch batch{
      at::randn({options.batch_size, 3, size, size}, at::device(device)),
      at::randint(kClasses, {options.batch_size}, at::device(device).dtype(at::kLong))};
  std::vector<Trainer> trainers = make_trainers(options.modes, device, batch);
  for (int i = 0; i < options.warm_up + options.iterations; ++i) {
    for (std::size_t turn = 0; turn < trainers.size(); ++turn) {
      Trainer& trainer = trainers[(static_cast<std::size_t>(i) + turn) % trainers.size()];
      const Times times = measure(trainer, batch);
      if (i < options.warm_up || get_rank() != 0) continue;
      std::printf("%-8s iteration %3d: time %8.1f ms, fp_time %8.1f ms, bp_time %8.1f ms\n",
                  trainer.mode().c_str(), i - options.warm_up, times.total, times.forward,
                  times.backward);
    }
  }
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("Trains ResNet-50 on synthetic images and times each iteration.");
  app.option_defaults()->always_capture_default();
  app.add_option(
         "--modes", options.modes,
         "paceline: our DistributedDataParallel; delayed: the same with one bucket, which is "
         "communicated after the backward, as in PyTorch 0.4.1; torch: c10d::Reducer on "
         "Gloo; none: no synchronisation; alone: none, on rank 0 while the others wait")
      ->delimiter(',')
      ->check(CLI::IsMember({"paceline", "delayed", "torch", "none", "alone"}));
  app.add_option("--batch-size", options.batch_size, "Images of each rank")
      ->check(CLI::Range(1, 4096));
  app.add_option("--image-size", options.image_size, "Height and width of an image")
      ->check(CLI::Range(32, 1024));
  app.add_option("--iterations", options.iterations, "Iterations of each mode")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--warm-up", options.warm_up, "Iterations before those")
      ->check(CLI::Range(0, 1'000'000));
  app.add_option("--device", options.device, "cuda: CUDA devices, which ranks may share")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--backend", options.backend, "What paceline and delayed reduce over")
      ->check(CLI::IsMember({"paceline", "gloo", "nccl"}));
  CLI11_PARSE(app, argc, argv);
  train(options);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return record([&] { return run(argc, argv); });
}
