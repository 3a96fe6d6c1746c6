#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "shm/collectives/group.h"
#include "support/cases.h"
#include "support/kernel_oracle.h"
#include "support/thread_ranks.h"

// Reductions whose path depends on their size, on the ranks' cores and on the staging buffers.
namespace paceline::shm {
namespace {

using test::run_thread_ranks;
using test::small_region;

using CollectivesUpTo5 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, CollectivesUpTo5, ::testing::Values(2, 3, 5), test::CaseName());

template <typename T>
void expect_averages(Group& group, DataType type, const std::vector<std::vector<T>>& inputs,
                     const std::vector<T>& averages) {
  namespace exact = test::exact;
  const std::vector<T>& input = inputs[static_cast<std::size_t>(group.rank())];
  const std::size_t count = input.size();
  std::vector<T> separate(count);
  group.all_reduce(input.data(), separate.data(), count, type, ReduceOp::avg);
  EXPECT_EQ(exact::bytes_of(separate), exact::bytes_of(averages)) << count << " unregistered";
  RegionMemory& memory = group.region()->memory();
  auto* const shared = static_cast<T*>(memory.allocate(count * sizeof(T)));
  std::copy(input.begin(), input.end(), shared);
  group.all_reduce(shared, shared, count, type, ReduceOp::avg);
  EXPECT_EQ(exact::bytes_of(std::vector<T>(shared, shared + count)), exact::bytes_of(averages))
      << count << " registered";
  memory.free(shared);
}

// On both sides of each limit in reductions.cpp, with large and with the smallest staging buffers,
// and with as many cores as there are and with one.
TEST_P(CollectivesUpTo5, ReductionsGiveTheBitsOfTheTreeOnEveryPath) {
  namespace exact = test::exact;
  const auto size = static_cast<std::size_t>(GetParam());
  const int core = base::affinity().front();
  std::vector<std::size_t> limits{64, 4096, 8192, 16384, 60'000};
  for (const std::size_t read : {2048u, 4096u, 49152u}) limits.push_back(read / size / 64 * 64);
  for (const std::size_t limit : limits) {
    for (const std::size_t bytes : {limit, limit + 64}) {
      const std::size_t count = bytes / 4;
      const auto floats = exact::random_sources<float>(size, count);
      const auto halves = exact::random_sources<exact::BFloat16>(size, 2 * count);
      const auto float_averages = exact::oracle(ReduceOp::avg, floats);
      const auto half_averages = exact::oracle(ReduceOp::avg, halves);
      for (const std::size_t staging : {std::size_t{1} << 20, std::size_t{4096}}) {
        auto options = small_region();
        options.staging_bytes = staging;
        const test::ThreadRegions one_core(GetParam(), options);
        std::vector<std::shared_ptr<Region>> crowded;
        for (int rank = 0; rank < GetParam(); ++rank)
          crowded.push_back(one_core.enter_on(core, rank));
        for (const auto& regions : {test::make_thread_regions(GetParam(), options), crowded}) {
          run_thread_ranks(regions, [&](auto region) {
            Group group(region);
            expect_averages(group, DataType::float32, floats, float_averages);
            expect_averages(group, DataType::bfloat16, halves, half_averages);
          });
        }
      }
    }
  }
}

// A rank that comes to a call before the others have added their cores takes the ranks for
// oversubscribed, which decides how many rounds the call takes.
TEST(Collectives, AgreeOnRoundsBeforeAllCoresAreKnown) {
  const std::vector<int> cores = base::affinity();
  if (cores.size() < 2 || base::core_quota() == 1) GTEST_SKIP() << "needs 2 cores";
  for (const bool shared : {false, true}) {
    const test::ThreadRegions regions(2);
    const auto sum_of_ranks = [&](const std::shared_ptr<Region>& region) {
      Group group(region);
      std::vector<float> own(3000);
      float* data = own.data();
      if (shared) data = static_cast<float*>(region->memory().allocate(own.size() * sizeof(float)));
      for (int call = 0; call < 3; ++call) {
        std::fill_n(data, own.size(), static_cast<float>(1 + region->rank()));
        group.all_reduce(data, data, own.size(), DataType::float32, ReduceOp::sum);
        EXPECT_EQ(std::count(data, data + own.size(), 3.0f), 3000);
      }
    };
    const auto early = regions.enter_on(cores[0], 0);
    const Word& in_call = early->memory().slot(0, 1).round;
    auto waiting = std::async(std::launch::async, [&] { sum_of_ranks(early); });
    while (in_call.load() != 1) std::this_thread::yield();
    sum_of_ranks(regions.enter_on(cores[1], 1));
    waiting.get();
  }
}

}  // namespace
}  // namespace paceline::shm
