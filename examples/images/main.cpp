// Classifies images in directories named after their classes.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace data = paceline::data;
namespace fs = std::filesystem;
namespace optim = paceline::optim;
namespace transforms = paceline::data::transforms;

struct Options {
  fs::path data;
  fs::path run = "runs/images";
  std::int64_t size = 28;
  int epochs = 4;
  int batch_size = 64;
  int num_workers = 1;
  double max_lr = 0.1;
  double weight_decay = 5e-4;
  double label_smoothing = 0.1;
  double average_decay = 0.99;
  std::uint64_t seed = 1;
};

void declare(paceline::Config& config, Options& options) {
  config.add("data", options.data, "Directory of train/CLASS/*.png and test/CLASS/*.png");
  config.add("run", options.run, "Directory of metrics and the trained network");
  config.add("size", options.size, "Height and width that images are scaled to");
  config.add("epochs", options.epochs);
  config.add("batch_size", options.batch_size, "Images of a step on each rank");
  config.add("num_workers", options.num_workers, "Threads of each rank that read images");
  config.add("max_lr", options.max_lr, "The highest learning rate");
  config.add("weight_decay", options.weight_decay);
  config.add("label_smoothing", options.label_smoothing);
  config.add("average_decay", options.average_decay, "Of the averages that are evaluated");
  config.add("seed", options.seed, "Of everything that is random");
}

torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                              std::int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

// Of a residual network.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t in, std::int64_t out)
      : layers(register_module(
            "layers", torch::nn::Sequential(convolution(in, out, 3, 2), torch::nn::BatchNorm2d(out),
                                            torch::nn::ReLU(), convolution(out, out, 3, 1),
                                            torch::nn::BatchNorm2d(out)))),
        shortcut(register_module("shortcut", convolution(in, out, 1, 2))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return (layers->forward(x) + shortcut(x)).relu();
  }

  torch::nn::Sequential layers;
  torch::nn::Conv2d shortcut;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t classes)
      : layers(register_module(
            "layers",
            torch::nn::Sequential(convolution(3, 16, 3, 1), torch::nn::BatchNorm2d(16),
                                  torch::nn::ReLU(), Block(16, 32), Block(32, 64), Block(64, 128),
                                  torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(),
                                  torch::nn::Linear(128, classes)))) {}

  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }

  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

using Model = paceline::DistributedDataParallel<NetImpl>;
using Sample = data::ImageFolder::Sample;

// The channels of ImageNet, which most collections of images are close to.
torch::Tensor normalize(const torch::Tensor& image) {
  return transforms::normalize(image, {0.485, 0.456, 0.406}, {0.229, 0.224, 0.225});
}

// The rows are true classes, the columns what the model says. Each image counts once.
torch::Tensor evaluate(Model& model, const data::ImageFolder& images, const Options& options) {
  auto set = data::map(images, [&](const Sample& sample) {
    return Sample(normalize(transforms::resize(sample.first, {options.size, options.size})),
                  sample.second);
  });
  data::DataLoader loader(set,
                          data::DistributedSampler(set.size(), {.shuffle = false, .pad = false}),
                          {.batch_size = 256, .num_workers = options.num_workers});
  const auto classes = static_cast<std::int64_t>(images.classes().size());
  const torch::NoGradGuard no_grad;
  model.eval();
  paceline::Metrics metrics;
  for (auto& [x, y] : loader) metrics.add_confusion("classes", model(x).argmax(1), y, classes);
  model.train();
  return metrics.reduce().confusion("classes", classes).to(torch::kDouble);
}

void train(const Options& options, const paceline::Config& config) {
  TORCH_CHECK(!options.data.empty(), "no images: give --data DIRECTORY");
  const auto world = paceline::init_process_group();
  const paceline::Logger log;
  config.save(options.run / "config.yaml");
  paceline::manual_seed(options.seed);

  const data::ImageFolder images(options.data / "train");
  const data::ImageFolder test_images(options.data / "test");
  TORCH_CHECK(images.classes() == test_images.classes(), "train/ and test/ have other classes");
  log.info(std::to_string(images.size()) + " images of " + std::to_string(images.classes().size()) +
           " classes");
  auto set = data::map(images, [&](const Sample& sample, at::Generator& generator) {
    auto image = transforms::random_resized_crop(sample.first, {options.size, options.size},
                                                 generator, {.scale = {0.7, 1.0}});
    image = transforms::random_horizontal_flip(image, 0.5, generator);
    return Sample(normalize(image), sample.second);
  });
  data::DataLoader loader(set, data::DistributedSampler(set.size(), {.seed = options.seed}),
                          {.batch_size = options.batch_size,
                           .num_workers = options.num_workers,
                           .drop_last = true,
                           .seed = options.seed});

  // Each BatchNorm uses the images of all ranks, as one process with the whole batch does.
  Model model{
      paceline::convert_sync_batchnorm(Net(static_cast<std::int64_t>(images.classes().size())))};
  TORCH_CHECK(loader.size() > 0, images.size(),
              " images are fewer than all ranks need for a batch");
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(options.max_lr)
                                                      .momentum(0.9)
                                                      .nesterov(true)
                                                      .weight_decay(options.weight_decay));
  optim::OneCycleLR schedule(optimizer, {.max_lr = {options.max_lr},
                                         .epochs = options.epochs,
                                         .steps_per_epoch = loader.size(),
                                         .cycle_momentum = false});
  optim::ExponentialMovingAverage average(*model.module(),
                                          {.decay = options.average_decay, .use_buffers = true});
  torch::nn::CrossEntropyLoss loss_of(
      torch::nn::CrossEntropyLossOptions().label_smoothing(options.label_smoothing));
  paceline::SummaryWriter writer(options.run, {.purge_step = 0});
  std::int64_t step = 0;
  torch::Tensor confusion;
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    paceline::Metrics metrics;
    for (auto& [x, y] : loader.epoch(epoch)) {
      optimizer.zero_grad();
      const torch::Tensor loss = loss_of(model(x), y);
      loss.backward();
      optimizer.step();
      schedule.step();
      average.update();
      ++step;
      metrics.add("train/loss", loss, y.size(0));
    }
    {
      const auto applied = average.apply();
      confusion = evaluate(model, test_images, options);
    }
    auto values = metrics.reduce().means;
    values["test/accuracy"] = (confusion.trace() / confusion.sum()).item<double>();
    writer.add_scalars(values, step);
    log.info("epoch " + std::to_string(epoch) + ": training loss " +
             std::to_string(values["train/loss"]) + ", test accuracy " +
             std::to_string(values["test/accuracy"]));
  }
  writer.flush();
  if (paceline::get_rank() != 0) return;
  const auto right = confusion.diag() / confusion.sum(1);
  for (std::size_t i = 0; i < images.classes().size(); ++i) {
    paceline::print(images.classes()[i] + ": " +
                    std::to_string(right[static_cast<std::int64_t>(i)].item<double>()));
  }
  const auto applied = average.apply();
  paceline::save(*model.module(), options.run / "net.safetensors");
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    Options options;
    paceline::Config config("Trains a residual network on a folder of images.");
    declare(config, options);
    if (const auto text = config.parse(argc, argv)) {
      paceline::print(*text);
    } else {
      train(options, config);
    }
  });
}
