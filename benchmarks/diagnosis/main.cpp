// What benchmarks/diagnosis/run starts: a rank of a training job with one thing wrong with it, or,
// with --hog, a process that takes a core or memory from others until it is ended, or the process
// that started it ends.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>
#include <paceline/record.h>
#include <sched.h>
#include <sys/mman.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "models/models.h"

namespace paceline::diagnosis {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

constexpr int kWarmUp = 6;
constexpr int kFewestSteps = 40;

struct Options {
  pid_t hog = 0;         // only takes a core, while this process is its parent
  std::size_t hold = 0;  // with `hog`: megabytes that it takes instead of a core
  std::string model = "lenet";
  std::string backend = "paceline";
  std::int64_t batch = 0;  // 0: the model's
  double seconds = 2;      // of training, roughly
  double loader = 0;       // milliseconds between steps, asleep
  int slow_rank = -1;
  double slow = 0;  // milliseconds more that this rank computes in each forward
  int late_rank = -1;
  double late = 0;     // milliseconds later that this rank begins its steps
  int late_every = 1;  // only after this many steps
  double uneven = 0;   // batches of ranks differ by this share, up and down
  int evaluate_every = 0;
  double evaluate = 0;      // milliseconds
  int evaluate_rank = -1;   // -1: all ranks
  int accumulate = 1;       // batches of a step
  double batch_loader = 0;  // milliseconds before each of them, asleep
  std::vector<int> pin;     // the core of each rank
  std::string data;         // a file that each step reads from, mapped
  int pages = 0;            // how many pages
};

void parse(int argc, char** argv, Options& options) {
  CLI::App app;
  app.add_option("--hog", options.hog);
  app.add_option("--hold", options.hold);
  app.add_option("--model", options.model);
  app.add_option("--backend", options.backend);
  app.add_option("--batch", options.batch);
  app.add_option("--seconds", options.seconds);
  app.add_option("--loader", options.loader);
  app.add_option("--slow-rank", options.slow_rank);
  app.add_option("--slow", options.slow);
  app.add_option("--late-rank", options.late_rank);
  app.add_option("--late", options.late);
  app.add_option("--late-every", options.late_every);
  app.add_option("--uneven", options.uneven);
  app.add_option("--evaluate-every", options.evaluate_every);
  app.add_option("--evaluate", options.evaluate);
  app.add_option("--evaluate-rank", options.evaluate_rank);
  app.add_option("--accumulate", options.accumulate);
  app.add_option("--batch-loader", options.batch_loader);
  app.add_option("--pin", options.pin)->delimiter(',');
  app.add_option("--data", options.data);
  app.add_option("--pages", options.pages);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
}

void compute_for(double milliseconds) {
  const auto end = Clock::now() + Milliseconds(milliseconds);
  while (Clock::now() < end) {
  }
}

// Takes memory, or with `megabytes` of 0 a core. `parent` may be killed, before this process looks
// for the first time too.
void take(pid_t parent, std::size_t megabytes) {
  const std::vector<char> held(megabytes << 20, 1);
  std::puts("taken");
  std::fflush(stdout);
  while (::getppid() == parent) {
    if (held.empty()) {
      compute_for(100);
    } else {
      std::this_thread::sleep_for(Milliseconds(100));
    }
  }
}

// A data set on disk. Reads random pages of it, as a map-style dataset with shuffling does.
class MappedData {
 public:
  explicit MappedData(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    bytes_ = std::filesystem::file_size(path);
    data_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0);
    ::close(file);
    if (data_ == MAP_FAILED) throw UsageError("cannot map " + path);
    for (std::size_t at = 0; at < bytes_; at += kPage) read(at);
    ::madvise(data_, bytes_, MADV_RANDOM);
  }
  MappedData(const MappedData&) = delete;
  MappedData& operator=(const MappedData&) = delete;
  ~MappedData() { ::munmap(data_, bytes_); }

  void read_some(int pages, std::mt19937& random) {
    std::uniform_int_distribution<std::size_t> page(0, bytes_ / kPage - 1);
    for (int i = 0; i < pages; ++i) read(page(random) * kPage);
  }

 private:
  static constexpr std::size_t kPage = 4096;

  void read(std::size_t at) { sum_ = sum_ + static_cast<const char*>(data_)[at]; }

  void* data_;
  std::size_t bytes_;
  volatile int sum_ = 0;
};

// A classifier that may compute longer than its model needs.
class SlowedImpl : public models::Classifier {
 public:
  SlowedImpl(const models::Model& model, double milliseconds)
      : inner_(register_module("inner", model.make())), milliseconds_(milliseconds) {}
  torch::Tensor forward(torch::Tensor x) override {
    compute_for(milliseconds_);
    return inner_->forward(std::move(x));
  }

 private:
  std::shared_ptr<models::Classifier> inner_;
  double milliseconds_;
};

class Training {
 public:
  Training(const Options& options, const models::Model& model)
      : options_(options),
        batch_(models::make_batch(model)),
        module_(std::make_shared<SlowedImpl>(model,
                                             get_rank() == options.slow_rank ? options.slow : 0)),
        ddp_(module_),
        sgd_(ddp_.parameters(), 1e-3),
        random_(static_cast<unsigned>(get_rank())) {
    if (!options.data.empty()) data_.emplace(options.data);
  }

  void steps(int count) {
    for (int i = 0; i < count; ++i) {
      step();
      between(++done_);
    }
  }

  // As many as fit into the time; the same on all ranks.
  int steps_in(double seconds) {
    const auto begin = Clock::now();
    steps(kWarmUp);
    const at::Tensor slowest =
        at::scalar_tensor(Milliseconds(Clock::now() - begin).count() / kWarmUp, at::kDouble);
    all_reduce(slowest, {.op = ReduceOp::MAX});
    return std::max(kFewestSteps, static_cast<int>(1e3 * seconds / slowest.item<double>()));
  }

 private:
  std::int64_t samples() {
    const auto all = batch_.input.size(0);
    if (options_.uneven == 0) return all;
    const double most = 1 + options_.uneven;  // which `all` is
    std::uniform_real_distribution<double> share(1 - options_.uneven, most);
    return std::max<std::int64_t>(1,
                                  std::llround(share(random_) / most * static_cast<double>(all)));
  }

  void step() {
    const auto count = samples();
    if (data_) data_->read_some(options_.pages, random_);
    sgd_.zero_grad();
    for (int batch = 1; batch <= options_.accumulate; ++batch) {
      const auto guard = ddp_.no_sync(batch < options_.accumulate);
      if (options_.batch_loader > 0) {
        std::this_thread::sleep_for(Milliseconds(options_.batch_loader));
      }
      at::cross_entropy_loss(ddp_(batch_.input.narrow(0, 0, count)),
                             batch_.target.narrow(0, 0, count))
          .backward();
    }
    sgd_.step();
  }

  void between(int step) {
    if (options_.loader > 0) std::this_thread::sleep_for(Milliseconds(options_.loader));
    if (get_rank() == options_.late_rank && step % options_.late_every == 0) {
      compute_for(options_.late);
    }
    if (options_.evaluate_every == 0 || step % options_.evaluate_every != 0) return;
    if (options_.evaluate_rank >= 0 && options_.evaluate_rank != get_rank()) return;
    const torch::NoGradGuard no_grad;
    const auto end = Clock::now() + Milliseconds(options_.evaluate);
    while (Clock::now() < end) module_->forward(batch_.input);
  }

  const Options& options_;
  models::Batch batch_;
  std::shared_ptr<SlowedImpl> module_;
  DistributedDataParallel<models::Classifier> ddp_;
  torch::optim::SGD sgd_;
  std::mt19937 random_;
  std::optional<MappedData> data_;
  int done_ = 0;
};

void pin(const Options& options) {
  if (options.pin.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  const std::size_t local_rank = std::stoul(std::getenv("LOCAL_RANK"));
  CPU_SET(options.pin.at(local_rank), &set);
  if (::sched_setaffinity(0, sizeof(set), &set) != 0) throw UsageError("cannot pin the rank");
}

// Prints what a step took, with all that passes between steps, in microseconds.
void train(const Options& options) {
  pin(options);
  const auto world = init_process_group({.backend = options.backend});
  const models::Model* const found = models::find_model(options.model);
  if (found == nullptr) throw UsageError("there is no model " + options.model);
  models::Model model = *found;
  if (options.batch > 0) model.batch = options.batch;
  model.batch = std::llround((1 + options.uneven) * static_cast<double>(model.batch));
  Training training(options, model);
  const int steps = training.steps_in(options.seconds);
  barrier();
  const auto begin = Clock::now();
  training.steps(steps);
  barrier();
  const double period = 1e3 * Milliseconds(Clock::now() - begin).count() / steps;
  if (get_rank() == 0) std::printf("period %.1f steps %d\n", period, steps);
}

}  // namespace

static int run(int argc, char** argv) {
  Options options;
  parse(argc, argv, options);
  if (options.hog != 0) {
    take(options.hog, options.hold);
    return 0;
  }
  return record([&] { train(options); });
}

}  // namespace paceline::diagnosis

int main(int argc, char** argv) {
  return paceline::diagnosis::run(argc, argv);
}
