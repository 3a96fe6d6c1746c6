#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/data/example.h>
#include <unistd.h>

#include <paceline/data_loader.h>
#include <paceline/error.h>

#include <array>
#include <atomic>
#include <barrier>
#include <csignal>
#include <filesystem>
#include <latch>
#include <numeric>
#include <semaphore>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "support/eventually.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A data set of a function.
template <typename Get>
struct Made {
  std::int64_t count;
  Get get;

  std::int64_t size() const { return count; }
};
template <typename Get>
Made(std::int64_t, Get) -> Made<Get>;

std::vector<std::int64_t> values(const at::Tensor& tensor) {
  const auto* const begin = tensor.const_data_ptr<std::int64_t>();
  return {begin, begin + tensor.numel()};
}

template <typename Loader>
std::vector<std::vector<std::int64_t>> all_batches(Loader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& batch : loader) batches.push_back(values(batch));
  return batches;
}

int count_threads() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                                        std::filesystem::directory_iterator()));
}

TEST(DataLoader, MakesBatchesInTheSamplersOrder) {
  Made set{7, [](std::int64_t i) { return 10 * i; }};
  for (const int workers : {0, 1, 2, 5}) {
    DataLoader loader(set, SequentialSampler(7), {.batch_size = 3, .num_workers = workers});
    EXPECT_EQ(loader.size(), 3);
    EXPECT_THAT(all_batches(loader),
                ElementsAre(ElementsAre(0, 10, 20), ElementsAre(30, 40, 50), ElementsAre(60)));
  }
}

TEST(DataLoader, GoesOnWhereItsStateWasTaken) {
  Made set{10, [](std::int64_t i) { return i; }};
  const RandomSampler sampler(10, 3);
  for (const int workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 3, .num_workers = workers};
    DataLoader whole(set, sampler, options);
    const auto expected = all_batches(whole.epoch(5));
    ASSERT_EQ(expected.size(), 4U);
    // Interrupted twice in the epoch, also after its last batch.
    for (int first = 1; first <= 4; ++first) {
      for (int second = 1; first + second <= 5; ++second) {
        std::vector<std::vector<std::int64_t>> got;
        at::IValue state;
        for (const int batches : {first, second, 100}) {
          DataLoader loader(set, sampler, options);
          if (!state.isNone()) loader.load_state_dict(state);
          EXPECT_EQ(loader.epoch(), state.isNone() ? 0 : 5);
          int taken = 0;
          for (auto& batch : loader.epoch(5)) {
            got.push_back(values(batch));
            if (++taken == batches) break;
          }
          state = loader.state_dict();
        }
        EXPECT_EQ(got, expected);
      }
    }
  }
}

TEST(DataLoader, AStateIsOfTheNextIterationOverItsEpochOnly) {
  Made set{6, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(6), {.batch_size = 2});
  auto iterator = loader.epoch(1).begin();
  ++iterator;
  const at::IValue state = loader.state_dict();
  loader.load_state_dict(state);
  EXPECT_EQ(loader.state_dict().toGenericDict().at("samples"), 4);
  EXPECT_EQ(all_batches(loader.epoch(2)).size(), 3U);
  EXPECT_EQ(all_batches(loader.epoch(1)).size(), 3U);
  loader.load_state_dict(state);
  EXPECT_THAT(all_batches(loader), ElementsAre(ElementsAre(4, 5)));
  EXPECT_EQ(all_batches(loader).size(), 3U);
  // The iteration that began last.
  auto other = loader.begin();
  ++iterator;
  EXPECT_EQ(loader.state_dict().toGenericDict().at("samples"), 2);
}

TEST(DataLoader, AStateIsThereUntilItsFirstBatchIs) {
  bool fails = true;
  Made set{6, [&](std::int64_t i) {
             if (std::exchange(fails, false)) throw std::runtime_error("not yet");
             return i;
           }};
  DataLoader loader(set, SequentialSampler(6), {.batch_size = 2});
  c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
  state.insert("epoch", 0);
  state.insert("samples", 4);
  loader.load_state_dict(state);
  EXPECT_THAT([&] { loader.begin(); }, ThrowsMessage<Error>(HasSubstr("not yet")));
  EXPECT_THAT(all_batches(loader), ElementsAre(ElementsAre(4, 5)));
}

TEST(DataLoader, RefusesAStateThatIsNone) {
  Made set{6, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(6));
  c10::impl::GenericDict half(c10::AnyType::get(), c10::AnyType::get());
  half.insert("epoch", 1);
  half.insert("samples", -1);
  for (const at::IValue& state : {at::IValue(), at::IValue(3), at::IValue(half)}) {
    EXPECT_THAT([&] { loader.load_state_dict(state); },
                ThrowsMessage<UsageError>(HasSubstr("no state of a loader")));
  }
}

// Every sample once, with any number of ranks before and after.
TEST(DataLoader, GoesOnWithAnotherNumberOfRanks) {
  constexpr std::int64_t kSize = 29;
  Made set{kSize, [](std::int64_t i) { return i; }};
  for (const int before : {1, 2, 3, 4}) {
    for (const int after : {1, 2, 3, 4}) {
      const auto loader_of = [&](int rank, int ranks) {
        return DataLoader(
            set, DistributedSampler(kSize, {.num_replicas = ranks, .rank = rank, .pad = false}),
            {.batch_size = 2});
      };
      std::multiset<std::int64_t> seen;
      at::IValue state;
      for (int rank = 0; rank < before; ++rank) {
        auto loader = loader_of(rank, before);
        int taken = 0;
        for (auto& batch : loader.epoch(2)) {
          for (const auto value : values(batch)) seen.insert(value);
          if (++taken == 3) break;
        }
        state = loader.state_dict();
      }
      for (int rank = 0; rank < after; ++rank) {
        auto loader = loader_of(rank, after);
        loader.load_state_dict(state);
        for (auto& batch : loader) {
          for (const auto value : values(batch)) seen.insert(value);
        }
      }
      std::vector<std::int64_t> all(kSize);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_THAT(seen, ::testing::ElementsAreArray(all)) << before << " to " << after;
    }
  }
}

TEST(DataLoader, DropsTheLastBatchOnRequest) {
  Made set{7, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(7),
                    {.batch_size = 3, .num_workers = 1, .drop_last = true});
  EXPECT_EQ(loader.size(), 2);
  EXPECT_THAT(all_batches(loader), ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3, 4, 5)));
}

TEST(DataLoader, AnEmptyDataSetHasNoBatches) {
  Made set{0, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(0), {.num_workers = 2});
  EXPECT_EQ(loader.size(), 0);
  EXPECT_TRUE(all_batches(loader).empty());
}

TEST(DataLoader, TheBatchesDoNotDependOnTheNumberOfWorkers) {
  Made set{1000, [](std::int64_t i) {
             if (i % 17 == 0) std::this_thread::yield();
             return i * i;
           }};
  const auto batches = [&](int workers, std::optional<int> prefetch) {
    DataLoader loader(set, DistributedSampler(1000, {.num_replicas = 2, .rank = 1}),
                      {.batch_size = 7, .num_workers = workers, .prefetch_factor = prefetch});
    loader.epoch(3);
    return all_batches(loader);
  };
  const auto expected = batches(0, {});
  for (const int workers : {1, 2, 3, 8}) {
    for (const int prefetch : {1, 2, 100}) EXPECT_EQ(batches(workers, prefetch), expected);
  }
}

TEST(DataLoader, SetsTheEpochOfTheSampler) {
  Made set{50, [](std::int64_t i) { return i; }};
  RandomSampler sampler(50);
  DataLoader loader(set, sampler, {.batch_size = 50, .num_workers = 1});
  for (const int epoch : {4, 1}) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader.epoch(epoch)) EXPECT_EQ(values(batch), sampler.indices());
  }
}

TEST(DataLoader, StacksTensorsAndTakesNumbersPairsTuplesArraysAndExamples) {
  const auto tensor = [](std::int64_t i) { return at::full({2, 3}, i, at::kFloat); };
  const auto first = [](auto get) {
    Made set{2, get};
    DataLoader loader(set, SequentialSampler(2), {.batch_size = 2});
    return *loader.begin();
  };
  const at::Tensor stacked = first(tensor);
  EXPECT_EQ(stacked.sizes(), at::IntArrayRef({2, 2, 3}));
  EXPECT_EQ(stacked[1][1][2].item<float>(), 1);

  auto [x, y] = first([&](std::int64_t i) { return std::pair(tensor(i), static_cast<int>(i)); });
  EXPECT_TRUE(x.equal(stacked));
  EXPECT_EQ(y.scalar_type(), at::kLong);
  EXPECT_THAT(values(y), ElementsAre(0, 1));

  auto [a, b, c] = first([](std::int64_t i) { return std::tuple(i == 1, 0.5F, 0.25); });
  EXPECT_EQ(a.scalar_type(), at::kBool);
  EXPECT_TRUE(a[1].item<bool>());
  EXPECT_EQ(b.scalar_type(), at::kFloat);
  EXPECT_EQ(c.scalar_type(), at::kDouble);

  auto [d, e, f] = first([](std::int64_t i) { return std::array{i, i + 1, i + 2}; });
  EXPECT_THAT(values(f), ElementsAre(2, 3));

  auto [data, target] = first([&](std::int64_t i) {
    return torch::data::Example<>(tensor(i), at::full({}, i, at::kLong));
  });
  EXPECT_TRUE(data.equal(stacked));
  EXPECT_THAT(values(target), ElementsAre(0, 1));
}

TEST(DataLoader, UsesTheGivenCollateFunction) {
  Made set{5, [](std::int64_t i) { return std::to_string(i); }};
  DataLoader loader(set, SequentialSampler(5), {.batch_size = 2, .num_workers = 2},
                    [](const std::vector<std::string>& samples) {
                      return std::accumulate(samples.begin(), samples.end(), std::string());
                    });
  std::vector<std::string> batches;
  for (auto& batch : loader) batches.push_back(batch);
  EXPECT_THAT(batches, ElementsAre("01", "23", "4"));
}

struct WholeBatches {
  std::int64_t get(std::int64_t index) const { return index; }
  std::string get_batch(std::span<const std::int64_t> indices) const {
    return std::to_string(indices.front()) + "-" + std::to_string(indices.back());
  }
};

TEST(DataLoader, LetsTheDataSetMakeWholeBatches) {
  const WholeBatches set;
  DataLoader loader(set, SequentialSampler(5), {.batch_size = 3});
  std::vector<std::string> batches;
  for (auto& batch : loader) batches.push_back(batch);
  EXPECT_THAT(batches, ElementsAre("0-2", "3-4"));

  DataLoader collating(set, SequentialSampler(2), {.batch_size = 2},
                       [](const std::vector<std::int64_t>& samples) { return samples; });
  EXPECT_THAT(*collating.begin(), ElementsAre(0, 1));
}

TEST(DataLoader, RethrowsAtTheFailedBatchWithTheSamplesIndex) {
  Made set{10, [](std::int64_t i) {
             if (i == 6) throw std::out_of_range("no such image");
             return i;
           }};
  for (const int workers : {0, 1, 3}) {
    DataLoader loader(set, SequentialSampler(10), {.batch_size = 2, .num_workers = workers});
    int batches = 0;
    try {
      for ([[maybe_unused]] auto& batch : loader) ++batches;
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "DataLoader: sample 6: no such image");
      EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
    }
    EXPECT_EQ(batches, 3);
  }
}

TEST(DataLoader, AnExceptionEndsTheIteration) {
  Made set{10, [](std::int64_t i) {
             if (i == 2) throw std::out_of_range("bad");
             return i;
           }};
  for (const int workers : {0, 2}) {
    DataLoader loader(set, SequentialSampler(10), {.batch_size = 2, .num_workers = workers});
    auto it = loader.begin();
    EXPECT_THROW(++it, Error);
    EXPECT_TRUE(it == loader.end());
    ++it;
    EXPECT_TRUE(it == loader.end());
  }
}

TEST(DataLoader, NamesTheSamplesThatDoNotFitTogether) {
  Made set{4, [](std::int64_t i) { return at::full({i + 1}, i); }};
  DataLoader loader(set, SequentialSampler(4), {.batch_size = 2, .num_workers = 1});
  EXPECT_THAT(
      [&] { loader.begin(); },
      ThrowsMessage<Error>(AllOf(HasSubstr("DataLoader: a batch of the samples 0, 1: "),
                                 HasSubstr("equal size"), ::testing::Not(HasSubstr("frame #")))));
}

TEST(DataLoader, ThreadsEndWithTheIteration) {
  Made set{100000, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(100000), {.batch_size = 2, .num_workers = 3});
  all_batches(loader);
  const int before = count_threads();
  for (int round = 0; round < 50; ++round) {
    int batches = 0;
    for ([[maybe_unused]] auto& batch : loader) {
      EXPECT_EQ(count_threads(), before + 3);
      if (++batches > round % 5) break;
    }
    // A joined thread disappears from /proc a moment later.
    EXPECT_TRUE(test::eventually([&] { return count_threads() == before; }));
  }
}

TEST(DataLoader, FetchesAheadUpToThePrefetchLimit) {
  constexpr int kAhead = 2 * 3;
  std::atomic<std::int64_t> taken = 0;
  std::atomic<std::int64_t> furthest = 0;
  std::counting_semaphore<> fetched(0);
  Made set{200, [&](std::int64_t i) {
             const std::int64_t ahead = i - taken;
             for (auto seen = furthest.load(); ahead > seen;) {
               if (furthest.compare_exchange_weak(seen, ahead)) break;
             }
             fetched.release();
             return i;
           }};
  DataLoader loader(set, SequentialSampler(200),
                    {.batch_size = 1, .num_workers = 2, .prefetch_factor = 3});
  for ([[maybe_unused]] auto& batch : loader) {
    // Workers fetch up to the limit without a request for the second batch.
    if (taken == 0)
      for (int i = 0; i < 1 + kAhead; ++i) fetched.acquire();
    ++taken;
  }
  EXPECT_EQ(furthest, kAhead);
}

TEST(BatchStream, StopsARunningFetchWhenTheIterationEnds) {
  std::latch started(1);
  bool stopped = false;
  {
    detail::BatchStream stream({{0}}, {.num_workers = 1},
                               [&](auto, const std::stop_token& stop) -> std::shared_ptr<void> {
                                 started.count_down();
                                 while (!stop.stop_requested()) std::this_thread::yield();
                                 stopped = true;
                                 return nullptr;
                               });
    started.wait();
  }
  EXPECT_TRUE(stopped);
}

TEST(DataLoader, WorkersFetchAtTheSameTime) {
  std::barrier both(2);
  Made set{2, [&](std::int64_t i) {
             both.arrive_and_wait();  // one worker would wait for ever
             return i;
           }};
  DataLoader loader(set, SequentialSampler(2), {.num_workers = 2});
  EXPECT_EQ(all_batches(loader).size(), 2);
}

TEST(DataLoader, WorkersComputeOnOneThreadEach) {
  at::set_num_threads(3);
  Made set{4, [](std::int64_t) { return at::get_num_threads(); }};
  DataLoader loader(set, SequentialSampler(4), {.num_workers = 2});
  for (auto& batch : loader) EXPECT_THAT(values(batch), Each(1));
  EXPECT_EQ(at::get_num_threads(), 3);
  std::jthread([] { EXPECT_EQ(at::get_num_threads(), 3); });
}

TEST(DataLoader, WorkersBlockAllSignalsExceptFaults) {
  const Made set{4, [](std::int64_t) -> std::int64_t {
                   sigset_t blocked;
                   ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
                   return sigismember(&blocked, SIGTERM) + 10 * sigismember(&blocked, SIGSEGV);
                 }};
  for (const int workers : {0, 2}) {
    DataLoader loader(set, SequentialSampler(4), {.batch_size = 4, .num_workers = workers});
    EXPECT_THAT(all_batches(loader), ElementsAre(Each(workers == 0 ? 0 : 1)));
  }
}

TEST(DataLoader, IterationsMayOverlap) {
  Made set{4, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(4), {.batch_size = 2, .num_workers = 2});
  std::vector<std::int64_t> seen;
  for (auto& outer : loader) {
    for (auto& inner : loader) {
      seen.push_back(10 * values(outer).front() + values(inner).front());
    }
  }
  EXPECT_THAT(seen, ElementsAre(0, 2, 20, 22));
}

TEST(DataLoader, AForkedChildMayLeaveTheLoopButNotContinueIt) {
  Made set{100, [](std::int64_t i) { return i; }};
  DataLoader loader(set, SequentialSampler(100), {.num_workers = 2});
  pid_t child = -1;
  int code = 0;
  try {
    for ([[maybe_unused]] auto& batch : loader) {
      child = ::fork();
      if (child != 0) break;
    }
  } catch (const UsageError&) {
    code = 7;
  }
  if (child == 0) ::_exit(code);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

TEST(DataLoader, RejectsOptionsOutOfRange) {
  Made set{4, [](std::int64_t i) { return i; }};
  const auto make = [&](DataLoaderOptions options) {
    return [&set, options] { DataLoader(set, SequentialSampler(4), options); };
  };
  EXPECT_THAT(make({.batch_size = 0}), ThrowsMessage<UsageError>(HasSubstr("batch_size is 0")));
  EXPECT_THAT(make({.num_workers = -1}), ThrowsMessage<UsageError>(HasSubstr("num_workers is -1")));
  EXPECT_THAT(make({.prefetch_factor = 0}),
              ThrowsMessage<UsageError>(HasSubstr("prefetch_factor is 0")));
  EXPECT_THAT(make({.prefetch_factor = 8}),
              ThrowsMessage<UsageError>(HasSubstr("prefetch_factor needs num_workers")));
}

}  // namespace
}  // namespace paceline::data
