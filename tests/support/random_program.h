#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <initializer_list>
#include <random>
#include <vector>

namespace paceline::test {

// Produces the same numbers with every standard library.
class Choice {
 public:
  explicit Choice(unsigned seed) : random_(seed) {}
  int below(std::size_t n) { return static_cast<int>(random_() % n); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <typename T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }

 private:
  std::mt19937 random_;
};

// A training program on several ranks; the seed determines all of it.
struct Program {
  struct Parameter {
    std::vector<std::int64_t> shape;
    at::ScalarType type;
    bool frozen;
  };
  struct Layer {
    std::size_t parameter;  // several layers may share one
    std::size_t input;      // an earlier layer, counted from 1, or 0 for the batch
    bool optional;          // some steps skip it
  };
  enum class Zero { no, fill, set_to_none };
  struct Step {
    // For each micro-batch, the forwards before its backward; all except the last are local.
    std::vector<int> forwards;
    std::vector<double> samples;  // by rank
    Zero after;
  };

  Program(unsigned the_seed, int ranks);
  bool runs(std::size_t layer, int rank, int step, int micro) const;
  torch::Tensor batch(int rank, int step, int micro, int forward) const;
  double weight(int rank, const Step& step) const;

  unsigned seed;
  int size;
  std::vector<Parameter> parameters;
  std::vector<Layer> layers;
  std::vector<Step> steps;
  bool unused;      // some layers are optional
  bool everywhere;  // the same layers are skipped on every rank and in every micro-batch
  bool weighted;    // averages over samples
};

inline constexpr std::int64_t kWidth = 9;

inline Program::Program(unsigned the_seed, int ranks) : seed(the_seed), size(ranks) {
  Choice choice(seed);
  unused = choice.one_in(2);
  everywhere = choice.one_in(3);
  weighted = choice.one_in(4);
  const bool doubles_only = choice.one_in(3);
  const int count = 2 + choice.below(7);
  for (int i = 0; i < count; ++i) {
    Parameter one{{kWidth, choice.of<std::int64_t>({9, 9, 100, 100, 2000, 2000, 2000, 40000})},
                  doubles_only ? at::kDouble : choice.of({at::kFloat, at::kFloat, at::kDouble}),
                  i > 0 && choice.one_in(6)};
    if (choice.one_in(3)) one.shape = {choice.of<std::int64_t>({1, kWidth})};
    if (i > 0 && choice.one_in(4)) one.shape = parameters.back().shape;
    parameters.push_back(one);
  }
  const int more = choice.below(3);
  for (int i = 0; i < count + more; ++i) {
    layers.push_back({static_cast<std::size_t>(i < count ? i : choice.below(parameters.size())),
                      static_cast<std::size_t>(choice.below(layers.size() + 1)),
                      unused && i > 0 && choice.one_in(2)});
  }
  for (int i = 0; i < 4; ++i) {
    Step step{{}, {}, choice.of({Zero::no, Zero::fill, Zero::set_to_none})};
    for (int micro = choice.below(3); micro >= 0; --micro) {
      step.forwards.push_back(choice.of({1, 1, 2}));
    }
    for (int rank = 0; rank < size; ++rank) step.samples.push_back(choice.below(4));
    step.samples[static_cast<std::size_t>(choice.below(step.samples.size()))] += 1;
    steps.push_back(step);
  }
}

inline bool Program::runs(std::size_t layer, int rank, int step, int micro) const {
  if (!layers[layer].optional) return true;
  std::seed_seq all{static_cast<int>(seed), static_cast<int>(layer), step, everywhere ? 0 : rank,
                    everywhere ? 0 : micro};
  return std::mt19937(all)() % 3 == 0;
}

inline torch::Tensor Program::batch(int rank, int step, int micro, int forward) const {
  torch::manual_seed(((seed * 100ULL + static_cast<std::uint64_t>(step)) * 100 +
                      static_cast<std::uint64_t>(10 * micro + forward)) *
                         100 +
                     static_cast<std::uint64_t>(rank));
  return torch::randn({5, kWidth}, at::kDouble);
}

// The weight of a rank's gradients in the average.
inline double Program::weight(int rank, const Step& step) const {
  if (!weighted) return 1.0 / size;
  double total = 0;
  for (const double one : step.samples) total += one;
  return step.samples[static_cast<std::size_t>(rank)] / total;
}

struct ProgramNetImpl : torch::nn::Module {
  explicit ProgramNetImpl(const Program& program) : program_(program) {
    torch::manual_seed(program_.seed);
    for (const auto& one : program_.parameters) {
      const auto value = torch::randn(one.shape, at::kDouble).to(one.type);
      weights.push_back(
          register_parameter(fmt::format("weight{}", weights.size()), value, !one.frozen));
    }
  }

  // The loss, which includes every layer.
  torch::Tensor forward(const torch::Tensor& x, int rank, int step, int micro) {
    std::vector<torch::Tensor> values{x};
    auto loss = torch::zeros({}, at::kDouble);
    for (std::size_t i = 0; i < program_.layers.size(); ++i) {
      const auto& layer = program_.layers[i];
      const auto& input = values[layer.input];
      values.push_back(program_.runs(i, rank, step, micro) ? apply(weights[layer.parameter], input)
                                                           : input);
      loss = loss + values.back().pow(2).mean();
    }
    return loss;
  }

  static torch::Tensor apply(const torch::Tensor& weight, const torch::Tensor& input) {
    const auto x = input.to(weight.scalar_type());
    if (weight.dim() == 1) return torch::tanh(x * weight).to(at::kDouble);
    return input + torch::tanh(x.matmul(weight)).mean(1, true).to(at::kDouble);
  }

  std::vector<torch::Tensor> weights;

 private:
  Program program_;
};
TORCH_MODULE(ProgramNet);

}  // namespace paceline::test
