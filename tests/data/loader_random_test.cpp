// Random numbers of samples, batch samplers and the timeout.

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/example.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <paceline/data_loader.h>
#include <paceline/error.h>
#include <paceline/log.h>

namespace paceline::data {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

// Its samples are random numbers.
struct Noise {
  std::int64_t size() const { return 24; }
  double get(std::int64_t /*index*/, at::Generator& generator) const {
    return at::rand({2}, generator, at::kDouble).sum().item<double>();
  }
};

// By sample.
using Numbers = std::vector<double>;

template <typename Loader>
Numbers numbers_of(Loader& loader) {
  Numbers numbers;
  for (auto& batch : loader) {
    const auto* const begin = batch.template const_data_ptr<double>();
    numbers.insert(numbers.end(), begin, begin + batch.numel());
  }
  return numbers;
}

TEST(SampleGenerator, DependsOnSeedEpochAndIndexOnly) {
  Noise set;
  DataLoader whole(set, SequentialSampler(24), {.batch_size = 5, .seed = 7});
  const Numbers expected = numbers_of(whole.epoch(3));
  EXPECT_THAT(std::set(expected.begin(), expected.end()), SizeIs(24));
  for (const int workers : {0, 1, 2, 4}) {
    for (const int ranks : {1, 2, 4, 8}) {
      Numbers got(24);
      for (int rank = 0; rank < ranks; ++rank) {
        const DistributedSamplerOptions share{
            .num_replicas = ranks, .rank = rank, .shuffle = false};
        DataLoader loader(set, DistributedSampler(24, share),
                          {.batch_size = 3, .num_workers = workers, .seed = 7});
        const Numbers own = numbers_of(loader.epoch(3));
        for (std::size_t i = 0; i < own.size(); ++i) {
          got[i * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(rank)] = own[i];
        }
      }
      EXPECT_EQ(got, expected) << workers << " workers, " << ranks << " ranks";
    }
  }
  DataLoader other_seed(set, SequentialSampler(24), {.batch_size = 5, .seed = 8});
  for (const Numbers& other : {numbers_of(whole.epoch(4)), numbers_of(other_seed.epoch(3))}) {
    for (std::size_t i = 0; i < other.size(); ++i) EXPECT_NE(other[i], expected[i]);
  }
}

TEST(SampleGenerator, IsTheSameAfterAResumption) {
  Noise set;
  const DataLoaderOptions options{.batch_size = 4, .num_workers = 2};
  DataLoader whole(set, RandomSampler(24, 1), options);
  const Numbers expected = numbers_of(whole.epoch(2));
  DataLoader first(set, RandomSampler(24, 1), options);
  Numbers got;
  for (auto& batch : first.epoch(2)) {
    for (int i = 0; i < 4; ++i) got.push_back(batch[i].item<double>());
    if (got.size() == 8) break;
  }
  DataLoader second(set, RandomSampler(24, 1), options);
  second.load_state_dict(first.state_dict());
  for (const double number : numbers_of(second)) got.push_back(number);
  EXPECT_EQ(got, expected);
}

// What the library logs while it lives.
class Log {
 public:
  Log() {
    set_log_callback([this](LogLevel, std::string_view text) { lines_.emplace_back(text); });
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  ~Log() { set_log_callback({}); }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

struct DefaultNoise {
  std::atomic<int> calls = 0;
  double get(std::int64_t /*index*/) {
    ++calls;
    return at::rand({1}).item<double>();
  }
};

TEST(SampleGenerator, IsMissedByAWarning) {
  const Log log;
  DefaultNoise set;
  for (const int workers : {0, 2}) {
    DataLoader loader(set, SequentialSampler(6), {.batch_size = 2, .num_workers = workers});
    EXPECT_THAT(log.lines(), IsEmpty());
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : loader.epoch(epoch)) EXPECT_EQ(batch.numel(), 2);
    }
  }
  EXPECT_THAT(log.lines(), ElementsAre(AllOf(HasSubstr("draws from LibTorch's default random"),
                                             HasSubstr("at::Generator&"))));
  EXPECT_EQ(set.calls, 24) << "no sample is fetched twice";
  Noise other;
  DataLoader loader(other, SequentialSampler(6), {.num_workers = 2});
  EXPECT_THAT(numbers_of(loader), SizeIs(6));
  EXPECT_THAT(log.lines(), SizeIs(1));
}

struct Identity {
  std::int64_t get(std::int64_t index) const { return index; }
};

template <typename Loader>
std::vector<std::vector<std::int64_t>> batches_of(Loader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& batch : loader) {
    const auto* const begin = batch.template const_data_ptr<std::int64_t>();
    batches.emplace_back(begin, begin + batch.numel());
  }
  return batches;
}

TEST(BatchSampler, GroupsTheSamplesOfASampler) {
  BatchSampler sampler(SequentialSampler(7), 3);
  EXPECT_EQ(sampler.size(), 3);
  EXPECT_THAT(sampler.batches(),
              ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3, 4, 5), ElementsAre(6)));
  EXPECT_THAT(BatchSampler(SequentialSampler(7), 3, true).batches(),
              ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3, 4, 5)));
  EXPECT_THAT([] { BatchSampler(SequentialSampler(7), 0); },
              ThrowsMessage<UsageError>(HasSubstr("batch_size is 0")));
  EXPECT_THAT([] { BatchSampler(std::shared_ptr<Sampler>(), 1); },
              ThrowsMessage<UsageError>(HasSubstr("null")));
}

// The chain of PyTorch's programs, on two ranks that become three.
TEST(BatchSampler, StandsForASamplerInALoader) {
  Identity set;
  const auto sampler = [](int ranks, int rank) {
    return DistributedSampler(24, {.num_replicas = ranks, .rank = rank});
  };
  std::multiset<std::int64_t> seen;
  at::IValue state;
  for (int rank = 0; rank < 2; ++rank) {
    DataLoader plain(set, sampler(2, rank), {.batch_size = 3});
    DataLoader loader(set, BatchSampler(sampler(2, rank), 3));
    EXPECT_EQ(loader.size(), 4);
    EXPECT_EQ(batches_of(loader.epoch(1)), batches_of(plain.epoch(1)));
    EXPECT_NE(batches_of(loader.epoch(2)), batches_of(loader.epoch(1)));
    auto iterator = loader.epoch(1).begin();
    for (int i = 0; i < 3; ++i) seen.insert((*iterator)[i].item<std::int64_t>());
    state = loader.state_dict();
  }
  for (int rank = 0; rank < 3; ++rank) {
    DataLoader loader(set, BatchSampler(sampler(3, rank), 2));
    loader.load_state_dict(state);
    for (const auto& batch : batches_of(loader)) seen.insert(batch.begin(), batch.end());
  }
  EXPECT_THAT(seen, SizeIs(24));
  EXPECT_THAT(std::set(seen.begin(), seen.end()), SizeIs(24)) << "each sample once";
}

// Batches of an order of their own.
class TwoThenOne : public BatchSamplerBase {
 public:
  std::int64_t size() const override { return 2; }
  std::vector<std::vector<std::int64_t>> batches() const override { return {{epoch_, 1}, {2}}; }
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::int64_t epoch_ = 0;
};

TEST(BatchSampler, MayBeOfTheProgram) {
  Identity set;
  DataLoader loader(set, TwoThenOne(), {.num_workers = 1});
  EXPECT_EQ(loader.size(), 2);
  EXPECT_THAT(batches_of(loader.epoch(9)), ElementsAre(ElementsAre(9, 1), ElementsAre(2)));
  auto iterator = loader.begin();
  DataLoader rest(set, TwoThenOne());
  rest.load_state_dict(loader.state_dict());
  EXPECT_THAT(batches_of(rest), ElementsAre(ElementsAre(2)));
  for (const DataLoaderOptions& options :
       {DataLoaderOptions{.batch_size = 2}, DataLoaderOptions{.drop_last = true}}) {
    EXPECT_THAT([&] { DataLoader(set, TwoThenOne(), options); },
                ThrowsMessage<UsageError>(HasSubstr("are options of the batch sampler")));
  }
}

// Hangs at one sample until it may go on.
struct Hanging {
  std::latch goes_on{1};
  std::atomic<int> hanging = 0;
  std::int64_t get(std::int64_t index) {
    if (index == 3) {
      ++hanging;
      goes_on.wait();
      --hanging;
    }
    return index;
  }
};

TEST(DataLoaderTimeout, NamesTheSamplesThatAreLate) {
  // Never destroyed, as the contract demands while the worker is in it.
  static Hanging set;
  {
    DataLoader loader(set, SequentialSampler(8),
                      {.batch_size = 2, .num_workers = 1, .timeout = 50ms});
    auto iterator = loader.begin();
    EXPECT_THAT([&] { ++iterator; },
                ThrowsMessage<Error>("DataLoader: a batch of the samples 2, 3 was not ready within "
                                     "the timeout of 0.05 s"));
    ++iterator;
    EXPECT_TRUE(iterator == loader.end());
  }
  EXPECT_EQ(set.hanging, 1) << "nothing waits for it";
  set.goes_on.count_down();
  while (set.hanging != 0) std::this_thread::yield();
}

TEST(DataLoaderTimeout, NeedsWorkers) {
  Identity set;
  EXPECT_THAT([&] { DataLoader(set, SequentialSampler(8), {.timeout = 1s}); },
              ThrowsMessage<UsageError>(HasSubstr("timeout needs num_workers")));
  EXPECT_THAT([&] { DataLoader(set, SequentialSampler(8), {.num_workers = 1, .timeout = -1s}); },
              ThrowsMessage<UsageError>(HasSubstr("timeout is -1000; it must be at least 0")));
}

struct Examples {
  torch::data::Example<> get(std::int64_t index) {
    return {at::full({2}, index), at::full({}, index, at::kLong)};
  }
};

TEST(PinMemory, IsOfEveryTensorWhereThereIsCuda) {
  const Log log;
  Examples set;
  std::int64_t next = 0;
  const bool has_cuda = at::globalContext().hasCUDA();
  for (const int workers : {0, 2}) {
    DataLoader loader(set, SequentialSampler(4),
                      {.batch_size = 2, .num_workers = workers, .pin_memory = true});
    for (auto& [x, y] : loader) {
      EXPECT_EQ(x.is_pinned(), has_cuda);
      EXPECT_EQ(y.is_pinned(), has_cuda);
      EXPECT_EQ(y[1].item<std::int64_t>(), 2 * (next++ % 2) + 1);
    }
  }
  EXPECT_EQ(next, 4);
  EXPECT_EQ(log.lines().size(), has_cuda ? 0U : 2U);
  if (!has_cuda) {
    EXPECT_THAT(log.lines()[0], HasSubstr("pin_memory is set, but there is no CUDA"));
  }
}

TEST(PinMemory, FindsTheTensorsOfExamples) {
  std::vector<std::int64_t> sizes;
  const auto visit = [&](const at::Tensor& tensor) { sizes.push_back(tensor.numel()); };
  for_each_tensor(torch::data::Example<>(at::ones(2), at::ones(3)), visit);
  for_each_tensor(std::vector{torch::data::TensorExample(at::ones(4))}, visit);
  EXPECT_THAT(sizes, ElementsAre(2, 3, 4));
}

}  // namespace
}  // namespace paceline::data
