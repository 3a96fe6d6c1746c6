// A small GPT that reads and writes text byte by byte.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numbers>
#include <regex>
#include <string>
#include <utility>
#include <vector>

namespace data = paceline::data;
namespace fs = std::filesystem;
namespace optim = paceline::optim;
using torch::nn::functional::cross_entropy;

constexpr std::int64_t kBytes = 256;  // the vocabulary

struct Options {
  fs::path text = "/usr/share/common-licenses";
  fs::path run = "runs/gpt";
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 128;
  std::int64_t context = 128;
  std::int64_t batch_size = 16;
  int accumulate = 2;
  std::int64_t steps = 600;
  std::int64_t warmup_steps = 50;
  double lr = 2e-3;
  bool bf16 = false;
  int log_every = 20;
  int evaluate_every = 100;
  std::uint64_t seed = 1;
  int sample = 400;
  bool fresh = false;
};

void declare(paceline::Config& config, Options& options) {
  config.add("text", options.text, "A text, or a directory of texts");
  config.add("run", options.run, "Directory of tokens, checkpoints and metrics");
  config.add("layers", options.layers);
  config.add("heads", options.heads, "Attention heads of a layer");
  config.add("width", options.width, "Features of a token; a multiple of heads");
  config.add("context", options.context, "Bytes that the model sees");
  config.add("batch_size", options.batch_size, "Blocks of a micro-batch on each rank");
  config.add("accumulate", options.accumulate, "Micro-batches of a step");
  config.add("steps", options.steps);
  config.add("warmup_steps", options.warmup_steps, "Steps until the highest learning rate");
  config.add("lr", options.lr, "The highest learning rate");
  config.add("bf16", options.bf16, "Compute in bfloat16");
  config.add("log_every", options.log_every, "Steps between lines with the loss");
  config.add("evaluate_every", options.evaluate_every, "Steps between validations and checkpoints");
  config.add("seed", options.seed);
  config.add("sample", options.sample, "Bytes to write at the end");
  config.add("fresh", options.fresh,
             "Begin anew: remove what a run has written, and no other file");
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t attention_heads)
      : heads(attention_heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(Shape{width}))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        projection(register_module("projection", torch::nn::Linear(width, width))),
        norm2(register_module("norm2", torch::nn::LayerNorm(Shape{width}))),
        mlp(register_module(
            "mlp", torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                                         torch::nn::Linear(4 * width, width)))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto parts = qkv(norm1(x)).unflatten(-1, {3 * heads, -1}).transpose(1, 2).chunk(3, 1);
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {},
                                                           /*dropout_p=*/0, /*is_causal=*/true);
    x = x + projection(attended.transpose(1, 2).flatten(2));
    return x + mlp->forward(norm2(x));
  }

  using Shape = std::vector<std::int64_t>;
  std::int64_t heads;
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv;
  torch::nn::Linear projection;
  torch::nn::LayerNorm norm2;
  torch::nn::Sequential mlp;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Options& options)
      : tokens(register_module("tokens", torch::nn::Embedding(kBytes, options.width))),
        positions(
            register_module("positions", torch::nn::Embedding(options.context, options.width))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        norm(register_module("norm",
                             torch::nn::LayerNorm(std::vector<std::int64_t>{options.width}))),
        head(register_module("head", torch::nn::Linear(options.width, kBytes))) {
    for (std::int64_t i = 0; i < options.layers; ++i) {
      blocks->push_back(Block(options.width, options.heads));
    }
    constexpr double kDeviation = 0.02;  // as GPT-2
    for (const auto& one : named_parameters()) {
      if (one.value().dim() == 2) torch::nn::init::normal_(one.value(), 0, kDeviation);
    }
  }

  // The logits of the byte after each of x, of shape (batch, bytes).
  torch::Tensor forward(const torch::Tensor& x) {
    const auto places = torch::arange(x.size(1), x.options());
    return head(norm(blocks->forward(tokens(x) + positions(places))));
  }

  torch::nn::Embedding tokens;
  torch::nn::Embedding positions;
  torch::nn::Sequential blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Gpt);

using Model = paceline::DistributedDataParallel<GptImpl>;

std::string read_text(const fs::path& path) {
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path());
    }
    std::ranges::sort(files);
  } else {
    files.push_back(path);
  }
  std::string text;
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    TORCH_CHECK(stream, "cannot read ", file.string());
    text.append(std::istreambuf_iterator<char>(stream), {});
  }
  return text;
}

// Of ten parts of the text, nine are for training.
void write_tokens(const std::string& text, const fs::path& directory) {
  constexpr std::size_t kPart = 4000;
  fs::create_directories(directory);
  std::string train;
  std::string valid;
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string& tokens = i / kPart % 10 == 9 ? valid : train;
    tokens += {text[i], '\0'};  // of 16 bits, as TokenDataset reads them
  }
  TORCH_CHECK(!valid.empty(), "a text of ", text.size(),
              " bytes is too short: give a longer --text");
  for (const auto& [name, tokens] : {std::pair("train.bin", &train), {"valid.bin", &valid}}) {
    if (fs::exists(directory / name)) {
      TORCH_CHECK(read_text(directory / name) == *tokens, directory.string(),
                  " is a run with another text: give --fresh or another --run");
      continue;
    }
    // Gets its name when it is complete.
    const fs::path hidden = directory / (std::string(".") + name);
    std::ofstream file(hidden, std::ios::binary);
    file.exceptions(std::ios::failbit | std::ios::badbit);
    file.write(tokens->data(), static_cast<std::streamsize>(tokens->size()));
    file.close();
    fs::rename(hidden, directory / name);
  }
}

// Nats for each byte, over the blocks of all ranks.
double evaluate(Model& model, const data::TokenDataset& set, const Options& options) {
  data::DataLoader loader(set,
                          data::DistributedSampler(set.size(), {.shuffle = false, .pad = false}),
                          {.batch_size = options.batch_size});
  const torch::NoGradGuard no_grad;
  model.eval();
  paceline::Metrics metrics;
  for (auto& [x, y] : loader) {
    const paceline::autocast guard(at::kCPU, {.enabled = options.bf16});
    metrics.add("loss", cross_entropy(model(x).flatten(0, 1), y.flatten()), y.numel());
  }
  model.train();
  return metrics.reduce().mean("loss");
}

std::string write_text(GptImpl& gpt, const Options& options) {
  const torch::NoGradGuard no_grad;
  gpt.eval();
  std::string text = "\n";
  auto context = torch::tensor({{std::int64_t{'\n'}}});
  for (int i = 0; i < options.sample; ++i) {
    constexpr double kTemperature = 0.7;
    const auto logits = gpt.forward(context).select(1, -1) / kTemperature;
    const auto next = torch::multinomial(logits.softmax(-1), 1);
    text += static_cast<char>(next.item<std::int64_t>());
    context = torch::cat({context, next}, 1);
    if (context.size(1) > options.context) context = context.slice(1, 1);
  }
  return text;
}

// A linear warm-up and then a cosine, from a tenth of the highest learning rate to a tenth.
double rate_of(std::int64_t step, const Options& options) {
  constexpr double kLeast = 0.1;
  if (step < options.warmup_steps) {
    return kLeast + (1 - kLeast) * static_cast<double>(step) / options.warmup_steps;
  }
  const double done = static_cast<double>(step - options.warmup_steps) /
                      std::max<std::int64_t>(options.steps - options.warmup_steps, 1);
  const double cosine = std::cos(std::numbers::pi * std::min(done, 1.0));
  return kLeast + (1 - kLeast) * (1 + cosine) / 2;
}

// Removes what a run writes. The directory may contain other files, which stay.
void remove_run(const fs::path& directory) {
  static const std::regex written(
      R"(step-\d{12,}|\.step-\d{12,}\..*|events\.out\.tfevents\..*|metrics\.jsonl|config\.yaml)"
      R"(|gpt\.safetensors|\.?(train|valid)\.bin)");
  if (!fs::exists(directory)) return;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (std::regex_match(entry.path().filename().string(), written)) fs::remove_all(entry.path());
  }
}

int train(const Options& options, const paceline::Config& config) {
  TORCH_CHECK(options.context >= 4, "context must be at least 4");
  for (const int each : {options.accumulate, options.log_every, options.evaluate_every}) {
    TORCH_CHECK(each >= 1, "accumulate, log_every and evaluate_every must be at least 1");
  }
  TORCH_CHECK(options.heads >= 1 && options.width % options.heads == 0,
              "width must be a multiple of heads");
  const auto world = paceline::init_process_group();
  const paceline::Logger log;
  if (paceline::get_rank() == 0) {
    if (options.fresh) remove_run(options.run);
    write_tokens(read_text(options.text), options.run);
  }
  paceline::barrier();  // the other ranks read what rank 0 has written
  paceline::manual_seed(options.seed);

  const data::TokenDataset train_set(
      options.run / "train.bin", {.block_size = options.context, .stride = options.context / 4});
  const data::TokenDataset valid_set(options.run / "valid.bin", {.block_size = options.context});
  data::DataLoader loader(train_set,
                          data::DistributedSampler(train_set.size(), {.seed = options.seed}),
                          {.batch_size = options.batch_size, .drop_last = true});
  TORCH_CHECK(loader.size() > 0, "the text has ", train_set.size(), " blocks, fewer than ",
              "all ranks need for a batch: give a longer --text or a smaller --batch_size");

  Model model{Gpt(options)};
  optim::AdamW optimizer(model.parameters(),
                         torch::optim::AdamWOptions(options.lr).weight_decay(0.1));
  // A function, which is no part of the state: a run that goes on may have other numbers of steps.
  optim::LambdaLR schedule(
      optimizer, {.lr_lambda = {[&](std::int64_t done) { return rate_of(done, options); }}});

  std::int64_t step = 0;
  double lr = options.lr;
  const paceline::States states{{"model", model},       {"optimizer", optimizer},
                                {"schedule", schedule}, {"loader", loader},
                                {"step", step},         {"lr", lr}};
  paceline::CheckpointDirectory checkpoints(options.run, {.keep_last = 2, .asynchronous = true});
  if (const auto resumed = checkpoints.resume(states)) log.info(resumed->message);
  TORCH_CHECK(lr == options.lr, "the run in ", options.run.string(), " has an lr of ", lr,
              ", which its optimizer's state keeps: --fresh begins one with ", options.lr);
  config.save(options.run / "config.yaml");
  log.info(std::to_string(train_set.tokens()) + " bytes to train with, on " +
           std::to_string(paceline::get_world_size()) + " ranks");
  paceline::SummaryWriter writer(options.run, {.purge_step = step + 1});
  paceline::Preemption preemption;

  paceline::Metrics metrics;
  int micro_batch = 0;
  for (auto epoch = loader.epoch(); step < options.steps; ++epoch) {
    for (auto& [x, y] : loader.epoch(epoch)) {
      const bool is_last = ++micro_batch % options.accumulate == 0;
      torch::Tensor loss;
      {
        const auto guard = model.no_sync(!is_last);  // gradients are averaged once a step
        {
          const paceline::autocast precision(at::kCPU, {.enabled = options.bf16});
          loss = cross_entropy(model(x).flatten(0, 1), y.flatten());
        }
        (loss / options.accumulate).backward();
        metrics.add("train/loss", loss, y.numel());
      }
      if (!is_last) continue;
      torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      schedule.step();
      if (++step % options.log_every == 0) {
        log.info("step " + std::to_string(step) + ": loss " + std::to_string(loss.item<double>()));
      }
      const bool is_preempted = preemption.requested();
      const bool evaluates = step % options.evaluate_every == 0 || step == options.steps;
      if (evaluates) {
        auto values = metrics.reduce().means;
        values["valid/bits_per_byte"] = evaluate(model, valid_set, options) / std::numbers::ln2;
        writer.add_scalars(values, step);
        log.info("step " + std::to_string(step) + ": training loss " +
                 std::to_string(values["train/loss"]) + ", valid bits per byte " +
                 std::to_string(values["valid/bits_per_byte"]));
      }
      if (evaluates || is_preempted) checkpoints.save(step, states);
      if (is_preempted) {
        checkpoints.wait();
        return paceline::Preemption::exit_code;
      }
      if (step == options.steps) break;
    }
  }
  checkpoints.wait();
  writer.flush();
  if (paceline::get_rank() == 0) {
    paceline::save(*model.module(), options.run / "gpt.safetensors");
    if (options.sample > 0) paceline::print(write_text(*model.module(), options));
  }
  return 0;
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    Options options;
    paceline::Config config("Trains a small GPT on the bytes of a text.");
    declare(config, options);
    if (const auto text = config.parse(argc, argv)) {
      paceline::print(*text);
      return 0;
    }
    return train(options, config);
  });
}
