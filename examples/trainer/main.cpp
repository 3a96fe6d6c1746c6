// A complete training program: configuration, augmented data, a schedule, validation, checkpoints,
// and an end that a scheduler may ask for at any time.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <regex>
#include <string>
#include <utility>
#include <vector>

namespace data = paceline::data;
namespace fs = std::filesystem;
namespace optim = paceline::optim;

struct Options {
  int epochs = 4;
  int batch_size = 64;
  int num_workers = 1;
  std::int64_t train_samples = 60000;
  std::uint64_t seed = 1;
  double lr = 2e-3;
  double weight_decay = 0.05;
  int warmup_epochs = 1;
  double clip_norm = 1;
  int checkpoint_every = 200;
  bool fresh = false;
  fs::path data = data::default_root();
  fs::path run = "runs/trainer";
};

void declare(paceline::Config& config, Options& options) {
  config.add("epochs", options.epochs, "Passes over the training set");
  config.add("batch_size", options.batch_size, "Images of a step on each rank");
  config.add("num_workers", options.num_workers, "Threads of each rank that load images");
  config.add("train_samples", options.train_samples, "How many images to train with");
  config.add("seed", options.seed, "Of everything that is random");
  config.add("optimizer.lr", options.lr, "The highest learning rate");
  config.add("optimizer.weight_decay", options.weight_decay);
  config.add("optimizer.warmup_epochs", options.warmup_epochs, "Epochs until the highest rate");
  config.add("optimizer.clip_norm", options.clip_norm, "The greatest norm of the gradients");
  config.add("checkpoint_every", options.checkpoint_every, "Steps from one checkpoint to the next");
  config.add("fresh", options.fresh,
             "Begin anew: remove what a run has written, and no other file");
  config.add("data", options.data, "Directory that contains fashion-mnist/");
  config.add("run", options.run, "Directory of checkpoints and metrics");
}

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential layers{register_module(
      "layers", torch::nn::Sequential(
                    torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 32, 5).stride(2).padding(2)),
                    torch::nn::BatchNorm2d(32), torch::nn::ReLU(),
                    torch::nn::Conv2d(torch::nn::Conv2dOptions(32, 64, 3).stride(2).padding(1)),
                    torch::nn::BatchNorm2d(64), torch::nn::ReLU(), torch::nn::Flatten(),
                    torch::nn::Dropout(0.2), torch::nn::Linear(64 * 7 * 7, 10)))};

  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }
};
TORCH_MODULE(Net);

using Model = paceline::DistributedDataParallel<NetImpl>;
using Samples = std::vector<std::pair<torch::Tensor, std::int64_t>>;

// What a function makes of the samples of a batch.
std::pair<torch::Tensor, torch::Tensor> collate(const Samples& samples) {
  auto [images, labels] = data::DefaultCollate()(samples);
  constexpr double kMean = 0.286;  // of the training set's pixels
  constexpr double kDeviation = 0.353;
  return {data::transforms::normalize(images, kMean, kDeviation), labels};
}

// Random, by the generator that belongs to the sample.
Samples::value_type augment(const Samples::value_type& sample, at::Generator& generator) {
  constexpr int kSize = 28;
  constexpr int kPadding = 2;
  auto image = data::transforms::random_crop(sample.first, kSize, kPadding, generator);
  image = data::transforms::random_horizontal_flip(image, 0.5, generator);
  return {image, sample.second};
}

// Over the samples of all ranks: each rank has its share, and no sample counts twice.
paceline::Metrics::Values evaluate(Model& model, const Options& options) {
  const data::FashionMnist set(options.data, data::Split::test);
  data::DataLoader loader(set,
                          data::DistributedSampler(set.size(), {.shuffle = false, .pad = false}),
                          {.batch_size = 500, .num_workers = options.num_workers}, collate);
  const torch::NoGradGuard no_grad;
  // Each rank has counted its own batches in BatchNorm's statistics since the last step.
  for (const torch::Tensor& buffer : model.module()->buffers()) paceline::broadcast(buffer);
  model.eval();
  paceline::Metrics metrics;
  for (auto& [x, y] : loader) {
    const torch::Tensor output = model(x);
    const auto right = (output.argmax(1) == y).to(torch::kDouble).mean();
    metrics.add("valid/loss", torch::nn::functional::cross_entropy(output, y), y.size(0));
    metrics.add("valid/accuracy", right, y.size(0));
  }
  model.train();
  return metrics.reduce();
}

// Removes what a run writes. The directory may contain other files, which stay.
void remove_run(const fs::path& directory) {
  static const std::regex written(
      R"(step-\d{12,}|\.step-\d{12,}\..*|events\.out\.tfevents\..*|metrics\.jsonl|config\.yaml)"
      R"(|net\.safetensors)");
  if (!fs::exists(directory)) return;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (std::regex_match(entry.path().filename().string(), written)) fs::remove_all(entry.path());
  }
}

int train(const Options& options, const paceline::Config& config) {
  TORCH_CHECK(options.epochs >= 1, "epochs is ", options.epochs, "; it must be at least 1");
  TORCH_CHECK(options.checkpoint_every >= 1, "checkpoint_every must be at least 1");
  const auto world = paceline::init_process_group();
  paceline::print("ranks: " + std::to_string(paceline::get_world_size()));
  if (options.fresh && paceline::get_rank() == 0) remove_run(options.run);
  // The only barrier: other ranks must not look for checkpoints before rank 0 has removed them.
  // Everything below that depends on other ranks is a collective call already, and waits for them.
  paceline::barrier();

  paceline::manual_seed(options.seed, {.per_rank = true});  // dropout differs between ranks
  const data::FashionMnist images(options.data, data::Split::train);
  TORCH_CHECK(
      options.train_samples >= 1 && std::cmp_less_equal(options.train_samples, images.size()),
      "train_samples is ", options.train_samples, "; it must be from 1 to ", images.size());
  std::vector<std::int64_t> first(static_cast<std::size_t>(options.train_samples));
  std::iota(first.begin(), first.end(), 0);
  auto set = data::map(data::Subset(images, first), augment);
  data::DataLoader loader(
      set,
      data::BatchSampler(data::DistributedSampler(set.size(), {.seed = options.seed}),
                         options.batch_size, /*drop_last=*/true),
      {.num_workers = options.num_workers, .seed = options.seed}, collate);
  TORCH_CHECK(loader.size() > 0, set.size(), " images are fewer than all ranks need for a batch");

  Model model{Net()};  // its parameters become rank 0's
  optim::AdamW optimizer(model.parameters(),
                         torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay));
  const std::int64_t warmup = options.warmup_epochs * loader.size();
  const std::int64_t all_steps = options.epochs * loader.size();
  optim::SequentialLR schedule(
      optimizer, {.schedulers = {optim::LinearLROptions{.start_factor = 0.1, .total_iters = warmup},
                                 optim::CosineAnnealingLROptions{
                                     .T_max = std::max<std::int64_t>(all_steps - warmup, 1)}},
                  .milestones = {warmup}});

  std::int64_t step = 0;
  std::int64_t epoch = 0;  // complete ones
  std::int64_t epochs = options.epochs;
  std::int64_t steps = all_steps;
  const paceline::States states{
      {"model", model}, {"optimizer", optimizer}, {"schedule", schedule}, {"loader", loader},
      {"step", step},   {"epoch", epoch},         {"epochs", epochs},     {"steps", steps}};
  paceline::CheckpointDirectory checkpoints(options.run,
                                            {.keep_last = 2, .keep_best = 1, .asynchronous = true});
  const auto resumed = checkpoints.resume(states);
  if (resumed) paceline::print(resumed->message);
  TORCH_CHECK(epochs == options.epochs, "the run in ", options.run.string(), " is of ", epochs,
              " epochs, and so is its schedule: --fresh begins one of ", options.epochs);
  TORCH_CHECK(
      steps == all_steps, "the run in ", options.run.string(), " is of ", steps,
      " steps, and so is its schedule: keep its batch_size, its train_samples and its number "
      "of ranks; or --fresh begins one of ",
      all_steps, " steps");
  if (!resumed) config.save(options.run / "config.yaml");

  paceline::SummaryWriter writer(options.run, {.purge_step = step + 1});
  paceline::Preemption preemption;
  paceline::Metrics metrics;
  while (epoch < epochs) {
    for (auto& [x, y] : loader.epoch(epoch)) {
      optimizer.zero_grad();
      const torch::Tensor loss = torch::nn::functional::cross_entropy(model(x), y);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model.parameters(), options.clip_norm);
      optimizer.step();
      schedule.step();
      ++step;
      metrics.add("train/loss", loss, y.size(0));
      if (preemption.requested()) {
        checkpoints.save(step, states);
        checkpoints.wait();
        paceline::print("preempted after step " + std::to_string(step));
        return paceline::Preemption::exit_code;
      }
      if (step % options.checkpoint_every == 0) checkpoints.save(step, states);
    }
    auto values = evaluate(model, options).means;
    values.merge(metrics.reduce().means);
    values["lr"] = schedule.get_last_lr()[0];
    writer.add_scalars(values, step);
    paceline::print("epoch " + std::to_string(epoch) + ": valid accuracy " +
                    std::to_string(values.at("valid/accuracy")));
    ++epoch;
    checkpoints.save(step, states, values.at("valid/accuracy"));
  }
  checkpoints.wait();
  writer.flush();
  if (paceline::get_rank() == 0) paceline::save(*model.module(), options.run / "net.safetensors");
  return 0;
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    Options options;
    paceline::Config config("Trains a convolutional network on Fashion-MNIST.");
    declare(config, options);
    if (const auto text = config.parse(argc, argv)) {
      paceline::print(*text);
      return 0;
    }
    return train(options, config);
  });
}
