// What a timeline costs a training step, and what `paceline top` does:
//
//     paceline run --nproc-per-node 2 build/release/bin/benchmark_tracing [MODEL...]
//
// Steps with and without one take turns, two seconds each, for 40 rounds. A line gives the median
// time of a step without, and what one with takes more, in % of the same round, with its 90 %
// confidence interval. What is written when the timeline is stopped is not part of it; the work of
// `paceline top` is, as it shares the ranks' cores. The first lines give what recording a span
// takes, and what a step takes to find out that nobody watches.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>
#include <paceline/record.h>
#include <torch/optim/sgd.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "measure/statistics.h"
#include "models/models.h"
#include "trace/live_view.h"
#include "trace/timeline.h"

namespace {

using namespace paceline;
using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr int kRounds = 40;
constexpr int kWarmUp = 10;
constexpr Microseconds kTurn{2e6};

class TracedTrainer {
 public:
  explicit TracedTrainer(const models::Model& model)
      : batch_(models::make_batch(model)), ddp_(model.make()), sgd_(ddp_.parameters(), 1e-3) {
    steps_ = kWarmUp;
    for (int guess = 0; guess < 3; ++guess) {
      const at::Tensor slowest = at::scalar_tensor(turn(), at::kDouble);
      all_reduce(slowest, {.op = ReduceOp::MAX});
      steps_ = static_cast<int>(kTurn.count() / slowest.item<double>()) + 1;
    }
  }

  // What a step takes, in microseconds.
  double turn() {
    barrier();
    const auto begin = Clock::now();
    for (int i = 0; i < steps_; ++i) {
      sgd_.zero_grad();
      at::cross_entropy_loss(ddp_(batch_.input), batch_.target).backward();
      sgd_.step();
    }
    return Microseconds(Clock::now() - begin).count() / steps_;
  }

 private:
  models::Batch batch_;
  DistributedDataParallel<models::Classifier> ddp_;
  torch::optim::SGD sgd_;
  int steps_ = 0;
};

std::filesystem::path directory() {
  return std::filesystem::temp_directory_path() /
         ("paceline-tracing-" + std::to_string(::getpid()));
}

// `paceline top` for the job, of rank 0. The constructor waits until ranks record for it, the
// destructor until they do no more.
class Viewer {
 public:
  Viewer() {
    barrier();  // all ranks have noticed the end of the one before
    if (get_rank() == 0) pid_ = start();
    while (trace::LiveView::watched() == nullptr) std::this_thread::sleep_for(kLook);
  }
  Viewer(const Viewer&) = delete;
  Viewer& operator=(const Viewer&) = delete;
  ~Viewer() {
    if (pid_ > 0 && ::kill(pid_, SIGKILL) == 0) ::waitpid(pid_, nullptr, 0);
    while (trace::LiveView::watched() != nullptr) std::this_thread::sleep_for(kLook);
  }

 private:
  static constexpr std::chrono::milliseconds kLook{10};

  static pid_t start() {
    const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "paceline";
    std::string name = program.string();
    std::string process = std::to_string(::getpid());
    std::string command = "top";
    char* const arguments[] = {name.data(), command.data(), process.data(), nullptr};
    posix_spawn_file_actions_t files;
    ::posix_spawn_file_actions_init(&files);
    ::posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t pid = 0;
    const int error = ::posix_spawn(&pid, name.c_str(), &files, nullptr, arguments, environ);
    ::posix_spawn_file_actions_destroy(&files);
    if (error != 0) throw UsageError("cannot start " + name + ": build it too");
    return pid;
  }

  pid_t pid_ = -1;
};

// What a call takes, in nanoseconds: the best of several rounds.
template <typename Call>
double time_of(Call call) {
  auto best = Clock::duration::max();
  constexpr int kCalls = 1000;
  for (int round = 0; round < 15; ++round) {
    const auto begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    best = std::min(best, Clock::now() - begin);
  }
  return std::chrono::duration<double, std::nano>(best).count() / kCalls;
}

void measure_calls() {
  const auto now = Clock::now();
  const trace::Span span{
      .kind = trace::Kind::step, .model = 0, .step = 1, .begin = now, .end = now};
  trace::Timeline::start(directory(), get_rank(), get_world_size());
  const double written = time_of([&] { trace::Timeline::current()->record(span); });
  trace::Timeline::stop();
  std::filesystem::remove_all(directory());
  trace::LiveView::start(get_rank(), get_world_size(), {});
  const double shown = time_of([&] { trace::LiveView::current()->record(span, 0); });
  const trace::LiveView* volatile watched = nullptr;
  const double asked = time_of([&] { watched = trace::LiveView::watched(); });
  if (get_rank() != 0) return;
  std::printf("recording a span: %.0f ns in a timeline, %.0f ns for paceline top\n", written,
              shown);
  std::printf("finding out that nobody watches: %.1f ns a step\n", asked);
}

enum class Mode { timeline, watched };

double turn_with(Mode mode, TracedTrainer& trainer) {
  if (mode == Mode::watched) {
    const Viewer viewer;
    return trainer.turn();
  }
  trace::Timeline::start(directory(), get_rank(), get_world_size());
  const double step = trainer.turn();
  trace::Timeline::stop();
  return step;
}

void measure(const std::string& name, Mode mode) {
  const models::Model* const model = models::find_model(name);
  if (model == nullptr) throw UsageError("there is no model " + name);
  TracedTrainer trainer(*model);
  const auto turn = [&](bool recorded) {
    return recorded ? turn_with(mode, trainer) : trainer.turn();
  };
  std::vector<double> plain;
  std::vector<double> cost;
  for (int round = 0; round < kRounds; ++round) {
    const bool first = round % 2 == 0;
    const double one = turn(first);
    const double other = turn(!first);
    plain.push_back(first ? other : one);
    cost.push_back(100 * ((first ? one : other) / plain.back() - 1));
  }
  std::filesystem::remove_all(directory());
  if (get_rank() != 0) return;
  const auto [median, low, high] = bench::median_interval(cost);
  std::printf("%-9s step %9.1f us, %s %+.2f %% (%+.2f to %+.2f)\n", name.c_str(),
              bench::median_interval(plain).median,
              mode == Mode::timeline ? "with a timeline" : "while watched", median, low, high);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  return record([&] {
    std::vector<std::string> names(argv + 1, argv + argc);
    if (names.empty()) names = {"tiny_mlp", "lenet", "wide_mlp"};
    at::set_num_threads(1);
    const auto world = init_process_group();
    measure_calls();
    for (const std::string& name : names) {
      for (const Mode mode : {Mode::timeline, Mode::watched}) measure(name, mode);
    }
  });
}
