// An epoch of data::DataLoader beside one of LibTorch's loader, over the same data set:
//
//     OMP_NUM_THREADS=1 build/release/bin/benchmark_data_loader
//
// The data set has 2000 images of 3 x 64 x 64 bytes, of which it makes a normalized image of 32 x
// 32 each. In each of 30 rounds all loaders iterate over it once; each line has the median times
// and the median of the ratios of the rounds with its 90 % confidence interval.

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include <paceline/paceline.h>

#include "measure/statistics.h"

namespace {

namespace td = torch::data;
namespace data = paceline::data;

constexpr int kEpochRounds = 30;
constexpr std::int64_t kImages = 2000;
constexpr std::int64_t kBatch = 32;

struct ResizedImages : td::datasets::Dataset<ResizedImages> {
  torch::Tensor images = torch::randint(256, {kImages, 3, 64, 64}, torch::kByte);

  td::Example<> get(std::size_t index) override {
    const auto image = data::transforms::to_float(images[static_cast<std::int64_t>(index)]);
    const auto small = data::transforms::resize(image, 32);
    return {data::transforms::normalize(small, 0.5, 0.25), torch::tensor(1)};
  }
  std::optional<std::size_t> size() const override { return kImages; }
};

template <typename Loader>
double epoch_milliseconds(Loader& loader) {
  const auto begin = std::chrono::steady_clock::now();
  std::int64_t batches = 0;
  for ([[maybe_unused]] auto& batch : loader) ++batches;
  TORCH_CHECK(batches == (kImages + kBatch - 1) / kBatch);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

void print_ratio(const char* name, const std::vector<double>& ours,
                 const std::vector<double>& theirs) {
  const auto ratio = paceline::bench::paired_speedup(ours, theirs);
  std::printf("%-48s %7.1f ms and %7.1f ms: %5.2f times as fast (%.2f to %.2f)\n", name,
              paceline::bench::quantile(ours, 0.5), paceline::bench::quantile(theirs, 0.5),
              ratio.median, ratio.low, ratio.high);
}

}  // namespace

int main() {
  ResizedImages set;
  std::map<int, std::vector<double>> ours;  // by workers
  std::map<int, std::vector<double>> theirs;
  for (int round = -2; round < kEpochRounds; ++round) {  // the first two are to warm up
    for (const int workers : {0, 2}) {
      auto their_loader = td::make_data_loader<td::samplers::SequentialSampler>(
          set.map(td::transforms::Stack<>()),
          td::DataLoaderOptions(kBatch).workers(static_cast<std::size_t>(workers)));
      data::DataLoader our_loader(set, data::SequentialSampler(kImages),
                                  {.batch_size = kBatch, .num_workers = workers});
      const double their_time = epoch_milliseconds(*their_loader);
      const double our_time = epoch_milliseconds(our_loader);
      if (round < 0) continue;
      theirs[workers].push_back(their_time);
      ours[workers].push_back(our_time);
    }
  }
  print_ratio("without workers, beside LibTorch's loader", ours[0], theirs[0]);
  print_ratio("with 2 workers, beside LibTorch's with 2", ours[2], theirs[2]);
  print_ratio("with 2 workers, beside ours without", ours[2], ours[0]);
  return 0;
}
