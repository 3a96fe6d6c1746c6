// Trains one model in several ways, by the same workers: with DistributedDataParallel; with a
// synchronous, a stale synchronous and an asynchronous parameter server; by Hogwild; and by local
// SGD. The first worker is slow. Prints and draws what each way gets out of the time.

#include <torch/torch.h>

#include <drawing/line_chart.h>
#include <drawing/save_svg.h>
#include <drawing/span_chart.h>
#include <paceline/paceline.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace F = torch::nn::functional;
namespace drawing = paceline::drawing;
using Clock = std::chrono::steady_clock;

// Rank 0 is the parameter server, and idle in the other ways; so all have as many workers.
constexpr int kSlowRank = 1;
constexpr std::int64_t kInputs = 32;
constexpr std::int64_t kClasses = 8;

struct Options {
  double seconds = 4;       // of training, for each way
  double step_ms = 4;       // what a step takes at least
  double slow_factor = 4;   // how many times as long it takes on the slow rank
  std::int64_t batch = 16;  // of a worker
  std::int64_t lead = 8;    // of bounded staleness
  std::int64_t period = 8;  // of local SGD
  double learning_rate = 0.1;
  std::string svg{};  // a directory for the charts; empty: none
};

void declare(paceline::Config& config, Options& options) {
  config.add("seconds", options.seconds, "How long each way trains");
  config.add("step_ms", options.step_ms, "Milliseconds that a step takes at least");
  config.add("slow_factor", options.slow_factor, "How many times as long on the slow worker");
  config.add("batch", options.batch, "Samples of a worker and step");
  config.add("lead", options.lead, "The most steps that a worker is ahead, if bounded");
  config.add("period", options.period, "Steps between two averages of local SGD");
  config.add("learning_rate", options.learning_rate);
  config.add("svg", options.svg, "A directory for the charts");
}

void check(const Options& options) {
  const auto require = [](bool is_right, const char* name, const char* range) {
    if (!is_right) throw paceline::UsageError(std::string(name) + " must be " + range);
  };
  const auto is_positive = [](double value) { return value > 0 && std::isfinite(value); };
  require(is_positive(options.seconds), "seconds", "positive");
  require(options.step_ms >= 0 && std::isfinite(options.step_ms), "step_ms", "0 or more");
  require(options.slow_factor >= 1 && std::isfinite(options.slow_factor), "slow_factor",
          "1 or more");
  require(options.batch >= 1, "batch", "1 or more");
  require(options.lead >= 0, "lead", "0 or more");
  require(options.period >= 1, "period", "1 or more");
  require(is_positive(options.learning_rate), "learning_rate", "positive");
  if (!options.svg.empty()) std::filesystem::create_directories(options.svg);
}

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(kInputs, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, kClasses));
}

// Samples whose classes a fixed network chooses; a worker never sees one twice.
class Samples {
 public:
  Samples() {
    torch::manual_seed(1);
    teacher_ = torch::randn({kInputs, kClasses});
    torch::manual_seed(100 + static_cast<std::uint64_t>(paceline::get_rank()));
  }
  std::pair<torch::Tensor, torch::Tensor> next(std::int64_t count) {
    const torch::Tensor x = torch::randn({count, kInputs});
    return {x, x.mm(teacher_).argmax(1)};
  }

 private:
  torch::Tensor teacher_;
};

// One step of one worker.
struct Record {
  double seconds;  // since the begin
  double loss;     // of its batch, before the update
};

// What a rank reports of one way to train.
struct Log {
  std::vector<Record> steps;
  double waiting = 0;  // seconds in the backward and the update, where it waits for other ranks
  double end = 0;      // seconds from the begin to the end of the last update
};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The steps of a worker: computes a gradient, in no less than its time, and has `update` use it.
class Worker {
 public:
  explicit Worker(const Options& options)
      : options_(options),
        step_time_(options.step_ms / 1e3 *
                   (paceline::get_rank() == kSlowRank ? options.slow_factor : 1)) {}

  void step(const std::function<torch::Tensor(const torch::Tensor&)>& forward,
            const std::function<void()>& update) {
    const auto begin = Clock::now();
    const auto [x, y] = samples_.next(options_.batch);
    const torch::Tensor loss = F::cross_entropy(forward(x), y);
    // A slow machine is one that sleeps here.
    std::this_thread::sleep_for(
        std::chrono::duration<double>(std::max(0.0, step_time_ - seconds_since(begin))));
    log_.steps.push_back({seconds_since(begin_), loss.item<double>()});
    const auto before = Clock::now();
    loss.backward();
    update();
    log_.waiting += seconds_since(before);
    log_.end = seconds_since(begin_);
  }
  bool is_time_over() const { return seconds_since(begin_) >= options_.seconds; }
  const Log& log() const { return log_; }

 private:
  const Options& options_;
  double step_time_;
  Samples samples_;
  Clock::time_point begin_ = Clock::now();
  Log log_;
};

// Trains over the workers' group, until its first rank says that the time is over.
Log train_in_group(const Options& options, const paceline::ProcessGroup& workers, bool local) {
  if (!workers.is_member()) return {};
  paceline::DistributedDataParallel model(make_net(), {.process_group = workers});
  torch::optim::SGD sgd(model.parameters(), options.learning_rate);
  if (local) {
    model.register_comm_hook(paceline::comm_hooks::post_local_sgd(
        paceline::comm_hooks::PostLocalSgdState({.process_group = workers,
                                                 .subgroup = workers,
                                                 .post_local_gradient_all_reduce = false})));
  }
  paceline::PeriodicModelAverager averager(
      {.period = local ? options.period : 1, .process_group = workers});
  Worker worker(options);
  const auto over = torch::zeros({1});
  while (over.item<float>() == 0) {
    for (std::int64_t i = 0; i < options.period; ++i) {
      sgd.zero_grad();
      worker.step([&](const torch::Tensor& x) { return model(x); },
                  [&] {
                    sgd.step();
                    if (local) averager.average_parameters(model.parameters());
                  });
    }
    over.fill_(worker.is_time_over() ? 1 : 0);
    paceline::broadcast(over, {.src = kSlowRank, .group = workers});
  }
  return worker.log();
}

// `staleness`: see ParameterServerOptions.
Log train_with_server(const Options& options, std::optional<std::int64_t> staleness,
                      std::optional<paceline::ParameterServerStats>& stats) {
  const auto net = make_net();
  const auto make_sgd = [&](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), options.learning_rate);
  };
  paceline::ParameterServer server(net, make_sgd, {.staleness = staleness});
  if (server.is_server()) {
    server.serve();
    stats = server.stats();
    return {};
  }
  Worker worker(options);
  auto trained = net;
  do {
    trained->zero_grad();
    worker.step([&](const torch::Tensor& x) { return trained->forward(x); },
                [&] { server.step(); });
  } while (!worker.is_time_over());
  server.leave();
  return worker.log();
}

// Without a server: the workers step on the same parameters, in memory that they share.
Log train_hogwild(const Options& options, const paceline::ProcessGroup& workers) {
  if (!workers.is_member()) return {};
  auto net = make_net();
  paceline::share_memory(net, workers);
  torch::optim::SGD sgd(net->parameters(), options.learning_rate);
  Worker worker(options);
  do {
    sgd.zero_grad();
    worker.step([&](const torch::Tensor& x) { return net->forward(x); }, [&] { sgd.step(); });
  } while (!worker.is_time_over());
  return worker.log();
}

// The mean loss of consecutive steps, of all workers together.
std::vector<drawing::Point> curve(const std::vector<Record>& records, bool over_time) {
  constexpr std::size_t kPoints = 40;
  const std::size_t length = std::max<std::size_t>(1, records.size() / kPoints);
  std::vector<drawing::Point> points;
  for (std::size_t begin = 0; begin + length <= records.size(); begin += length) {
    double loss = 0;
    for (std::size_t i = begin; i < begin + length; ++i) loss += records[i].loss;
    const std::size_t middle = begin + length / 2;
    points.push_back({over_time ? records[middle].seconds : static_cast<double>(middle),
                      loss / static_cast<double>(length)});
  }
  return points;
}

class Report {
 public:
  Report() {
    over_time_.title = "Loss over time";
    over_time_.x.label = "seconds";
    over_steps_.title = "Loss over gradients";
    over_steps_.x.label = "gradients of all workers";
    for (auto* chart : {&over_time_, &over_steps_}) chart->y.label = "loss";
    staleness_.title = "Staleness of gradients";
    staleness_.x.label = "steps of the server since the worker pulled";
    staleness_.y.label = "% of gradients";
    waiting_.title = "Backward and update, where workers wait; the first one is slow";
    waiting_.axis_label = "% of a worker's time";
    waiting_.legend = {"backward and update"};
    if (paceline::get_rank() != 0) return;
    std::printf("%-18s %12s %26s %15s %10s\n%-18s %12s %12s %13s\n", "", "gradients/s",
                "in backward and update", "mean staleness", "last loss", "", "", "slow one",
                "others");
  }

  // Collective. `stats`: of the server, on rank 0.
  void add(const char* name, const Log& own,
           const std::optional<paceline::ParameterServerStats>& stats) {
    std::vector<Record> records;
    double end = 0;
    std::vector<double> waits;  // by worker, the part of its time
    for (const std::string& bytes : gather(own)) {
      Log log;
      std::memcpy(&log.waiting, bytes.data(), sizeof(double));
      std::memcpy(&log.end, bytes.data() + sizeof(double), sizeof(double));
      constexpr std::size_t kHeader = 2 * sizeof(double);
      log.steps.resize((bytes.size() - kHeader) / sizeof(Record));
      if (log.steps.empty()) continue;
      std::memcpy(log.steps.data(), bytes.data() + kHeader, bytes.size() - kHeader);
      waits.push_back(log.waiting / log.end);
      end = std::max(end, log.end);
      records.insert(records.end(), log.steps.begin(), log.steps.end());
    }
    if (paceline::get_rank() != 0) return;
    std::ranges::sort(records, {}, &Record::seconds);
    double others = 0;
    for (std::size_t i = 1; i < waits.size(); ++i) others += waits[i];
    const auto over_time = curve(records, true);
    std::printf("%-18s %12.0f %10.0f %% %11.0f %% %15s %10.3f\n", name,
                static_cast<double>(records.size()) / end, 100 * waits.front(),
                waits.size() > 1 ? 100 * others / static_cast<double>(waits.size() - 1) : 0.0,
                staleness_in_words(stats).c_str(), over_time.back().y);
    std::fflush(stdout);
    over_time_.lines.push_back({name, over_time});
    over_steps_.lines.push_back({name, curve(records, false)});
    if (stats) staleness_.lines.push_back({name, shares_of(stats->staleness)});
    for (std::size_t i = 0; i < waits.size(); ++i) {
      waiting_.rows.push_back(
          {i == 0 ? std::string(name) + ", slow" : "", {{"", 0, 100 * waits[i]}}});
    }
  }

  void draw(const std::string& directory) const {
    if (paceline::get_rank() != 0) return;
    constexpr int kColumns = 100;
    const auto show = [&](const auto& chart, const char* file) {
      std::printf("\n%s", chart.to_terminal(kColumns).c_str());
      if (directory.empty()) return;
      drawing::save_svg(chart.to_svg(), std::filesystem::path(directory) / file);
    };
    show(over_time_, "over_time.svg");
    show(over_steps_, "over_gradients.svg");
    show(staleness_, "staleness.svg");
    show(waiting_, "waiting.svg");
  }

 private:
  static std::vector<std::string> gather(const Log& own) {
    std::string bytes(reinterpret_cast<const char*>(&own.waiting), sizeof(double));
    bytes.append(reinterpret_cast<const char*>(&own.end), sizeof(double));
    bytes.append(reinterpret_cast<const char*>(own.steps.data()),
                 own.steps.size() * sizeof(Record));
    return paceline::all_gather_bytes(bytes);
  }
  // In percent, of each value up to the largest.
  static std::vector<drawing::Point> shares_of(const std::map<std::int64_t, std::int64_t>& counts) {
    double sum = 0;
    for (const auto& [value, count] : counts) sum += static_cast<double>(count);
    std::vector<drawing::Point> shares;
    for (const auto& [value, count] : counts) {
      while (static_cast<std::int64_t>(shares.size()) < value) {
        shares.push_back({static_cast<double>(shares.size()), 0});
      }
      shares.push_back({static_cast<double>(value), 100 * static_cast<double>(count) / sum});
    }
    return shares;
  }
  static std::string staleness_in_words(
      const std::optional<paceline::ParameterServerStats>& stats) {
    if (!stats) return "-";
    double sum = 0;
    double updates = 0;
    for (const auto& [staleness, count] : stats->staleness) {
      sum += static_cast<double>(staleness * count);
      updates += static_cast<double>(count);
    }
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f", updates > 0 ? sum / updates : 0);
    return text;
  }

  drawing::LineChart over_time_;
  drawing::LineChart over_steps_;
  drawing::LineChart staleness_;
  drawing::SpanChart waiting_;
};

void compare(const Options& options) {
  const auto world = paceline::init_process_group();
  if (paceline::get_world_size() < 3) {
    throw paceline::UsageError("this needs a server and two workers: start 3 ranks or more");
  }
  std::vector<int> workers;
  for (int rank = 1; rank < paceline::get_world_size(); ++rank) workers.push_back(rank);
  const auto group = paceline::new_group(workers);
  Report report;
  const auto with_server = [&](const char* name, std::optional<std::int64_t> staleness) {
    std::optional<paceline::ParameterServerStats> stats;
    const Log log = train_with_server(options, staleness, stats);
    report.add(name, log, stats);
  };
  report.add("DDP", train_in_group(options, group, false), {});
  with_server("synchronous server", 0);
  with_server("bounded staleness", options.lead);
  with_server("asynchronous", {});
  if (paceline::get_local_world_size() == paceline::get_world_size()) {
    report.add("Hogwild", train_hogwild(options, group), {});
  }
  report.add("local SGD", train_in_group(options, group, true), {});
  report.draw(options.svg);
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    Options options;
    paceline::Config config("Compares ways to train in parallel, with one slow worker.");
    declare(config, options);
    if (const auto text = config.parse(argc, argv)) return paceline::print(*text);
    check(options);
    compare(options);
  });
}
