// How many updates Hogwild loses:
//
//     paceline run --nproc-per-node 2 build/release/bin/benchmark_hogwild [--rounds 40]
//
// All ranks add 1 to elements of a shared float32 tensor, without locks, as often as each other: to
// all elements in order, as a dense gradient does, or to one at random, as a sparse one does. A
// line gives the share of the additions that is missing afterwards, in %: the median of the rounds
// with its 90 % confidence interval.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/hogwild.h>
#include <paceline/record.h>

#include <CLI/CLI.hpp>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "measure/statistics.h"

namespace {

using namespace paceline;

constexpr std::int64_t kAdditions = 1 << 22;  // of each rank in a round

void add_to_all(at::Tensor& shared) {
  for (std::int64_t i = 0; i < kAdditions / shared.numel(); ++i) shared.add_(1);
}

void add_to_one(at::Tensor& shared) {
  static std::minstd_rand random(static_cast<unsigned>(get_rank()) + 1);
  std::uniform_int_distribution<std::int64_t> element(0, shared.numel() - 1);
  auto* const data = shared.data_ptr<float>();
  for (std::int64_t i = 0; i < kAdditions; ++i) data[element(random)] += 1;
}

void measure(std::int64_t elements, const char* name, const std::function<void(at::Tensor&)>& add,
             int rounds) {
  auto shared = at::zeros({elements});
  share_memory({{"shared", shared}});
  std::vector<double> lost;
  for (int round = 0; round < rounds; ++round) {
    if (get_rank() == 0) shared.zero_();
    barrier();
    add(shared);
    barrier();
    const double expected = static_cast<double>(kAdditions) * get_world_size();
    lost.push_back(100 * (1 - shared.sum(at::kDouble).item<double>() / expected));
    barrier();
  }
  if (get_rank() != 0) return;
  const auto [median, low, high] = bench::median_interval(lost);
  std::printf("%8ld elements, %-6s lost %6.2f %% (%.2f to %.2f)\n", elements, name, median, low,
              high);
  std::fflush(stdout);
}

int measure_all(int argc, char** argv) {
  int rounds = 40;
  CLI::App app("Measures how many updates Hogwild loses.");
  app.option_defaults()->always_capture_default();
  app.add_option("--rounds", rounds, "Rounds of measurement")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  const auto world = init_process_group();
  for (const std::int64_t elements : {1 << 4, 1 << 10, 1 << 16, 1 << 20}) {
    measure(elements, "all", add_to_all, rounds);
    measure(elements, "random", add_to_one, rounds);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return record([&] { return measure_all(argc, argv); });
}
