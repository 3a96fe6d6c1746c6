// Proximal policy optimization: every rank plays games of its own, and all learn from all of them.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <numbers>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace fs = std::filesystem;

struct Options {
  int games = 8;
  int rollout_steps = 128;
  int max_updates = 200;
  int epochs = 4;
  int minibatches = 4;
  double lr = 1e-3;
  double gamma = 0.99;
  double gae_lambda = 0.95;
  double clip = 0.2;
  double entropy_weight = 0.01;
  double value_weight = 0.5;
  double clip_norm = 0.5;
  double solved_at = 475;  // as Gymnasium says of CartPole-v1
  std::uint64_t seed = 1;
  fs::path run = "runs/ppo";
};

void declare(paceline::Config& config, Options& options) {
  config.add("games", options.games, "Games that each rank plays side by side");
  config.add("rollout_steps", options.rollout_steps, "Moves in each game between two updates");
  config.add("max_updates", options.max_updates);
  config.add("epochs", options.epochs, "Passes over the moves in an update");
  config.add("minibatches", options.minibatches, "Parts of a pass");
  config.add("lr", options.lr, "The learning rate at the beginning; it falls to 0");
  config.add("gamma", options.gamma, "How much a later reward counts");
  config.add("gae_lambda", options.gae_lambda);
  config.add("clip", options.clip, "How far an update may change the probability of a move");
  config.add("entropy_weight", options.entropy_weight);
  config.add("value_weight", options.value_weight);
  config.add("clip_norm", options.clip_norm, "The greatest norm of the gradients");
  config.add("solved_at", options.solved_at, "Stop at this mean return of 100 games");
  config.add("seed", options.seed);
  config.add("run", options.run, "Directory of metrics and the trained network");
}

// A pole on a cart: Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve
// difficult learning control problems" (1983), with the limits of Gymnasium's CartPole-v1. Each
// move gives a reward of 1.
class CartPole {
 public:
  using State = std::array<float, 4>;  // position, velocity, angle, angular velocity

  explicit CartPole(std::uint64_t seed) : random_(seed) { reset(); }

  const State& state() const { return state_; }
  int moves() const { return moves_; }
  bool has_fallen() const {
    constexpr double kMostAngle = 12 * std::numbers::pi / 180;
    constexpr double kMostPosition = 2.4;
    return std::abs(state_[0]) > kMostPosition || std::abs(state_[2]) > kMostAngle;
  }
  bool is_over() const {
    constexpr int kMostMoves = 500;
    return has_fallen() || moves_ == kMostMoves;
  }

  void reset() {
    std::uniform_real_distribution<float> start(-0.05F, 0.05F);
    for (float& value : state_) value = start(random_);
    moves_ = 0;
  }

  // Pushes the cart to the left (0) or to the right (1).
  void move(std::int64_t action) {
    constexpr double kGravity = 9.8;
    constexpr double kCart = 1.0;
    constexpr double kPole = 0.1;
    constexpr double kHalfLength = 0.5;
    constexpr double kForce = 10.0;
    constexpr double kSeconds = 0.02;
    const auto [x, v, angle, spin] = state_;
    const double sine = std::sin(angle);
    const double cosine = std::cos(angle);
    const double push =
        ((action == 1 ? kForce : -kForce) + kPole * kHalfLength * spin * spin * sine) /
        (kCart + kPole);
    const double turn = (kGravity * sine - cosine * push) /
                        (kHalfLength * (4.0 / 3 - kPole * cosine * cosine / (kCart + kPole)));
    const double drive = push - kPole * kHalfLength * turn * cosine / (kCart + kPole);
    state_ = {static_cast<float>(x + kSeconds * v), static_cast<float>(v + kSeconds * drive),
              static_cast<float>(angle + kSeconds * spin),
              static_cast<float>(spin + kSeconds * turn)};
    ++moves_;
  }

 private:
  std::mt19937_64 random_;
  State state_{};
  int moves_ = 0;
};

struct ActorCriticImpl : torch::nn::Module {
  ActorCriticImpl()
      : actor(register_module("actor", network(2, 0.01))),
        critic(register_module("critic", network(1, 1.0))) {}

  // The log probabilities of the moves, and the expected return.
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& states) {
    return {actor->forward(states).log_softmax(-1), critic->forward(states).squeeze(-1)};
  }

  static torch::nn::Sequential network(std::int64_t outputs, double last_gain) {
    constexpr std::int64_t kWidth = 64;
    const auto layer = [](std::int64_t in, std::int64_t out, double gain) {
      torch::nn::Linear linear(in, out);
      torch::nn::init::orthogonal_(linear->weight, gain);
      torch::nn::init::zeros_(linear->bias);
      return linear;
    };
    return torch::nn::Sequential(layer(4, kWidth, std::numbers::sqrt2), torch::nn::Tanh(),
                                 layer(kWidth, kWidth, std::numbers::sqrt2), torch::nn::Tanh(),
                                 layer(kWidth, outputs, last_gain));
  }

  torch::nn::Sequential actor;
  torch::nn::Sequential critic;
};
TORCH_MODULE(ActorCritic);

using Model = paceline::DistributedDataParallel<ActorCriticImpl>;

// The moves of this rank's games since the last update; each tensor is (moves of all games, ...).
struct Rollout {
  torch::Tensor states;
  torch::Tensor actions;
  torch::Tensor log_probabilities;
  torch::Tensor advantages;
  torch::Tensor returns;
};

class Actor {
 public:
  Actor(const Options& options, int rank) : options_(options) {
    for (int i = 0; i < options.games; ++i) {
      games_.emplace_back(options.seed + static_cast<std::uint64_t>(rank * options.games + i));
    }
  }

  Rollout play(Model& model) {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> states;
    std::vector<torch::Tensor> actions;
    std::vector<torch::Tensor> log_probabilities;
    std::vector<torch::Tensor> values;
    std::vector<torch::Tensor> rewards;
    std::vector<torch::Tensor> goes_on;
    for (int step = 0; step < options_.rollout_steps; ++step) {
      states.push_back(observe());
      const auto [all, value] = model(states.back());
      const torch::Tensor action = torch::multinomial(all.exp(), 1);
      actions.push_back(action.squeeze(1));
      const auto chosen = actions.back().accessor<std::int64_t, 1>();
      log_probabilities.push_back(all.gather(1, action).squeeze(1));
      values.push_back(value);
      auto reward = torch::ones({options_.games});
      auto continues = torch::ones({options_.games});
      for (int i = 0; i < options_.games; ++i) {
        CartPole& game = games_[i];
        game.move(chosen[i]);
        if (!game.is_over()) continue;
        // A game that ends at the limit of moves would have gone on.
        if (!game.has_fallen()) {
          const auto rest = model(torch::tensor(at::ArrayRef<float>(game.state()))).second;
          reward[i] += options_.gamma * rest;
        }
        continues[i] = 0;
        last_returns_.push_back(game.moves());
        if (last_returns_.size() > kept_returns_) last_returns_.pop_front();
        game.reset();
      }
      rewards.push_back(reward);
      goes_on.push_back(continues);
    }
    // Generalized advantage estimation: Schulman et al., arXiv:1506.02438.
    torch::Tensor next_value = model(observe()).second;
    torch::Tensor advantage = torch::zeros({options_.games});
    std::vector<torch::Tensor> advantages(states.size());
    for (std::size_t i = states.size(); i-- > 0;) {
      const auto error = rewards[i] + options_.gamma * next_value * goes_on[i] - values[i];
      advantage = error + options_.gamma * options_.gae_lambda * goes_on[i] * advantage;
      advantages[i] = advantage;
      next_value = values[i];
    }
    const auto flat = [](const std::vector<torch::Tensor>& steps) { return torch::cat(steps); };
    return {flat(states), flat(actions), flat(log_probabilities), flat(advantages),
            flat(advantages) + flat(values)};
  }

  // Of the last games of this rank, 100 of all ranks.
  const std::deque<double>& last_returns() const { return last_returns_; }

 private:
  torch::Tensor observe() const {
    std::vector<torch::Tensor> all;
    for (const CartPole& game : games_) {
      all.push_back(torch::tensor(at::ArrayRef<float>(game.state())));
    }
    return torch::stack(all);
  }

  const Options& options_;
  std::vector<CartPole> games_;
  std::size_t kept_returns_ = std::max(100 / paceline::get_world_size(), 1);
  std::deque<double> last_returns_;
};

// Advantages with mean 0 and deviation 1 over the moves of all ranks, as one process would have.
torch::Tensor normalize(const torch::Tensor& advantages) {
  const auto sums = torch::stack({advantages.sum(), advantages.square().sum()}).to(torch::kDouble);
  paceline::all_reduce(sums);
  const double count = static_cast<double>(advantages.numel()) * paceline::get_world_size();
  const double mean = sums[0].item<double>() / count;
  const double variance = sums[1].item<double>() / count - mean * mean;
  return (advantages - mean) / (std::sqrt(std::max(variance, 0.0)) + 1e-8);
}

// Schulman et al., "Proximal policy optimization algorithms", arXiv:1707.06347.
void update(Model& model, torch::optim::Optimizer& optimizer, const Rollout& rollout,
            const Options& options) {
  const auto advantages = normalize(rollout.advantages);
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    for (const auto& part : torch::randperm(advantages.size(0)).chunk(options.minibatches)) {
      const auto [log_all, values] = model(rollout.states.index_select(0, part));
      const auto actions = rollout.actions.index_select(0, part).unsqueeze(1);
      const auto log_now = log_all.gather(1, actions).squeeze(1);
      const auto ratio = (log_now - rollout.log_probabilities.index_select(0, part)).exp();
      const auto advantage = advantages.index_select(0, part);
      const auto gain = torch::min(ratio * advantage,
                                   ratio.clamp(1 - options.clip, 1 + options.clip) * advantage);
      const auto value_loss = torch::mse_loss(values, rollout.returns.index_select(0, part));
      const auto entropy = -(log_all.exp() * log_all).sum(-1).mean();
      const auto loss =
          -gain.mean() + options.value_weight * value_loss - options.entropy_weight * entropy;
      optimizer.zero_grad();
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model.parameters(), options.clip_norm);
      optimizer.step();
    }
  }
}

// Returns whether the mean return of the last 100 games has reached the goal.
bool train(const Options& options, const paceline::Config& config) {
  TORCH_CHECK(
      options.games >= 1 && options.rollout_steps >= 1 && options.epochs >= 1 &&
          options.minibatches >= 1 && options.minibatches <= options.games * options.rollout_steps,
      "games, rollout_steps and epochs must be at least 1, and minibatches from 1 to games * "
      "rollout_steps");
  const auto world = paceline::init_process_group();
  config.save(options.run / "config.yaml");
  paceline::manual_seed(options.seed, {.per_rank = true});  // each rank chooses moves of its own
  Actor actor(options, paceline::get_rank());
  Model model{ActorCritic()};
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(options.lr).eps(1e-5));
  paceline::optim::LinearLR schedule(
      optimizer, {.start_factor = 1.0, .end_factor = 0.0, .total_iters = options.max_updates});
  paceline::SummaryWriter writer(options.run, {.purge_step = 0});
  paceline::Metrics metrics;
  bool is_solved = false;
  for (int i = 1; i <= options.max_updates && !is_solved; ++i) {
    update(model, optimizer, actor.play(model), options);
    schedule.step();
    for (const double value : actor.last_returns()) metrics.add("return", value);
    const double mean = metrics.reduce().mean("return");
    is_solved = mean >= options.solved_at;  // the same on all ranks, so all stop at once
    writer.add_scalar("return", mean, i);
    if (i % 10 == 0 || is_solved) {
      paceline::print("update " + std::to_string(i) + ": mean return " + std::to_string(mean));
    }
  }
  writer.flush();
  if (paceline::get_rank() == 0) paceline::save(*model.module(), options.run / "ppo.safetensors");
  if (!is_solved) {
    paceline::print("not solved after " + std::to_string(options.max_updates) + " updates");
  }
  return is_solved;
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    Options options;
    paceline::Config config("Learns to balance a pole on a cart by PPO.");
    declare(config, options);
    if (const auto text = config.parse(argc, argv)) {
      paceline::print(*text);
      return 0;
    }
    return train(options, config) ? 0 : 1;
  });
}
