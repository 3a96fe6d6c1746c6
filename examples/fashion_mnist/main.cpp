// Trains a small convolutional network on Fashion-MNIST on any number of ranks.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace data = paceline::data;
namespace fs = std::filesystem;

struct Options {
  int epochs = 6;
  int batch_size = 64;
  double lr = 0.05;
  std::string device = "auto";
  fs::path data = data::default_root();
  fs::path output = "fashion_mnist.pt";
};

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential layers{register_module(
      "layers", torch::nn::Sequential(
                    torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).stride(2).padding(2)),
                    torch::nn::ReLU(),
                    torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).stride(2).padding(1)),
                    torch::nn::ReLU(), torch::nn::Flatten(), torch::nn::Linear(32 * 7 * 7, 128),
                    torch::nn::ReLU(), torch::nn::Linear(128, 10)))};

  torch::Tensor forward(const torch::Tensor& images) {
    constexpr double mean = 0.286;  // of the training set's pixels
    constexpr double deviation = 0.353;
    return layers->forward((images - mean) / deviation);
  }
};
TORCH_MODULE(Net);

using Model = paceline::DistributedDataParallel<NetImpl>;

torch::Device device_of(const Options& options) {
  TORCH_CHECK(options.device == "auto" || options.device == "cpu" || options.device == "cuda",
              "device must be auto, cpu or cuda");
  if (options.device == "cpu") return torch::kCPU;
  const torch::Device device = paceline::local_device();
  if (options.device == "cuda" && device.is_cpu()) {
    throw paceline::UsageError("--device cuda: this rank would use " +
                               paceline::describe_local_device());
  }
  return device;
}

void train(Model& model, torch::Device device, const Options& options) {
  const data::FashionMnist set(options.data, data::Split::train);
  data::DataLoader loader(
      set, data::DistributedSampler(set.size()),
      {.batch_size = options.batch_size, .num_workers = 1, .pin_memory = device.is_cuda()});
  torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(options.lr).momentum(0.9));
  torch::optim::StepLR schedule(sgd, 1, 0.65);
  paceline::Progress progress({.epochs = options.epochs, .steps = loader.size(), .output = stdout});
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    progress.start_epoch(epoch);
    for (auto& [x, y] : loader.epoch(epoch)) {
      sgd.zero_grad();
      const torch::Tensor output = model(x.to(device, /*non_blocking=*/true));
      const torch::Tensor loss =
          torch::nn::functional::cross_entropy(output, y.to(device, /*non_blocking=*/true));
      loss.backward();
      sgd.step();
      progress.step(x.size(0), loss.item<double>());
    }
    schedule.step();
  }
}

struct Score {
  int64_t correct;
  int64_t total;
};

// Every rank evaluates its share of the test set, without padding: each image counts exactly once.
Score evaluate(Model& model, torch::Device device, const Options& options) {
  const data::FashionMnist set(options.data, data::Split::test);
  data::DataLoader loader(set,
                          data::DistributedSampler(set.size(), {.shuffle = false, .pad = false}),
                          {.batch_size = 500, .num_workers = 1});
  const torch::NoGradGuard no_grad;
  model.eval();
  const torch::Tensor counts = torch::zeros({2}, torch::kLong);
  for (auto& [x, y] : loader) {
    counts[0] += (model(x.to(device)).argmax(1).to(torch::kCPU) == y).sum();
    counts[1] += y.size(0);
  }
  paceline::all_reduce(counts);
  return {counts[0].item<int64_t>(), counts[1].item<int64_t>()};
}

// Detects a path that cannot be written before the training, not after it.
void check_writable(const fs::path& file) {
  const bool exists = fs::exists(file);
  if (!std::ofstream(file, std::ios::app)) {
    throw paceline::UsageError("--output " + file.string() + ": cannot write this file: " +
                               std::generic_category().message(errno));
  }
  if (!exists) fs::remove(file);
}

void train_and_evaluate(const Options& options) {
  TORCH_CHECK(options.epochs >= 1, "epochs must be at least 1");
  const torch::Device device = device_of(options);
  const auto world = paceline::init_process_group();
  if (paceline::get_rank() == 0) check_writable(options.output);  // the rank that saves
  torch::manual_seed(0);
  Net net;
  net->to(device);
  Model model(net);

  const auto start = std::chrono::steady_clock::now();
  train(model, device, options);
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  const Score score = evaluate(model, device, options);

  if (paceline::get_rank() != 0) return;
  std::printf("trained in %.1f s on %d ranks; test accuracy %.2f %% (%ld of %ld images)\n",
              time.count(), paceline::get_world_size(),
              100.0 * static_cast<double>(score.correct) / static_cast<double>(score.total),
              score.correct, score.total);
  paceline::save(*model.module(), options.output);
  std::printf("the model is in %s\n", fs::absolute(options.output).c_str());
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    Options options;
    paceline::Config config("Trains a small convolutional network on Fashion-MNIST.");
    config.add("epochs", options.epochs, "Passes over the training set");
    config.add("batch_size", options.batch_size, "Images per step and rank");
    config.add("lr", options.lr, "Learning rate of the first epoch");
    config.add("device", options.device, "cpu; cuda; or auto: a CUDA device if there is one");
    config.add("data", options.data, "Directory that contains fashion-mnist/");
    config.add("output", options.output, "File to save the trained model in");
    if (const auto text = config.parse(argc, argv)) {
      paceline::print(*text);
    } else {
      train_and_evaluate(options);
    }
  });
}
