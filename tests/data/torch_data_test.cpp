// Paceline's samplers in LibTorch's loader, and LibTorch's data sets in Paceline's.

#include <paceline/torch_data.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include <paceline/data_loader.h>
#include <paceline/error.h>

namespace paceline::data {
namespace {

namespace td = torch::data;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

constexpr std::int64_t kSize = 24;

// Sample i is (i, -i).
struct Numbers : td::datasets::Dataset<Numbers> {
  td::Example<> get(std::size_t index) override {
    const auto number = static_cast<std::int64_t>(index);
    return {torch::tensor(number), torch::tensor(-number)};
  }
  std::optional<std::size_t> size() const override { return kSize; }
};

using Batches = std::vector<std::vector<std::int64_t>>;

std::vector<std::int64_t> numbers_of(const at::Tensor& batch) {
  const auto* const begin = batch.const_data_ptr<std::int64_t>();
  return {begin, begin + batch.numel()};
}

auto stacked() {
  return Numbers().map(td::transforms::Stack<>());
}

template <typename Loader>
Batches iterate(Loader& loader) {
  Batches batches;
  for (auto& batch : loader) batches.push_back(numbers_of(batch.data));
  return batches;
}

Batches batches_of(DistributedSampler sampler, std::int64_t epoch, std::int64_t batch_size,
                   bool drop_last = false) {
  BatchSampler batches(std::move(sampler), batch_size, drop_last);
  batches.set_epoch(epoch);
  return batches.batches();
}

TEST(TorchSampler, BeginsTheNextEpochWithEachIteration) {
  const DistributedSamplerOptions share{.num_replicas = 2, .rank = 1, .seed = 3};
  for (const std::size_t workers : {0U, 2U}) {
    auto sampler = distributed(kSize, share);
    auto loader =
        td::make_data_loader(stacked(), sampler, td::DataLoaderOptions(5).workers(workers));
    for (const int epoch : {0, 1, 2}) {
      EXPECT_EQ(iterate(*loader), batches_of(DistributedSampler(kSize, share), epoch, 5));
      EXPECT_EQ(sampler.epoch(), epoch);
    }
    sampler.set_epoch(7);
    EXPECT_EQ(iterate(*loader), batches_of(DistributedSampler(kSize, share), 7, 5));
    EXPECT_EQ(sampler.epoch(), 7);
  }
}

// With the batches that one process has.
TEST(TorchSampler, DealsTheBatchesOfOneProcess) {
  auto alone =
      td::make_data_loader(stacked(), distributed(kSize, {.num_replicas = 1, .rank = 0}), 8);
  std::vector<Batches> of_ranks;
  for (const int rank : {0, 1, 2, 3}) {
    auto loader =
        td::make_data_loader(stacked(), distributed(kSize, {.num_replicas = 4, .rank = rank}), 2);
    of_ranks.push_back(iterate(*loader));
  }
  const Batches expected = iterate(*alone);
  ASSERT_THAT(expected, SizeIs(3));
  for (std::size_t step = 0; step < expected.size(); ++step) {
    std::set<std::int64_t> joint;
    for (const Batches& own : of_ranks) joint.insert(own[step].begin(), own[step].end());
    EXPECT_EQ(joint, std::set(expected[step].begin(), expected[step].end()));
  }
}

TEST(TorchSampler, GoesOnWithWhatTheLoaderHasNotHandedOut) {
  for (const bool drop_last : {false, true}) {
    for (const std::size_t workers : {0U, 1U, 3U}) {
      for (const std::size_t jobs : {1U, 4U, 100U}) {
        const DistributedSamplerOptions share{.num_replicas = 2, .rank = 0};
        // Without workers, LibTorch's loader takes no max_jobs.
        const auto options = td::DataLoaderOptions(5)
                                 .workers(workers)
                                 .max_jobs(workers == 0 ? 0 : jobs)
                                 .drop_last(drop_last);
        const Batches expected = batches_of(DistributedSampler(kSize, share), 1, 5, drop_last);
        for (std::size_t first = 1; first <= expected.size(); ++first) {
          auto sampler = distributed(kSize, share);
          auto loader = td::make_data_loader(stacked(), sampler, options);
          sampler.set_epoch(1);
          Batches got;
          at::IValue state;
          for (auto& batch : *loader) {
            got.push_back(numbers_of(batch.data));
            if (got.size() != first) continue;
            state = sampler.state_dict(*loader);
          }
          EXPECT_EQ(got, expected);
          got.resize(first);
          auto other = distributed(kSize, share);
          auto rest = td::make_data_loader(stacked(), other, options);
          other.load_state_dict(state);
          EXPECT_EQ(other.epoch(), 1);
          EXPECT_EQ(other.state_dict(*rest), state);
          for (const auto& batch : iterate(*rest)) got.push_back(batch);
          EXPECT_EQ(got, expected) << first;
          EXPECT_EQ(iterate(*rest), batches_of(DistributedSampler(kSize, share), 2, 5, drop_last));
        }
      }
    }
  }
}

TEST(TorchSampler, ItsStateIsThatOfALoader) {
  Numbers set;
  auto sampler = distributed(kSize, {.num_replicas = 3, .rank = 0});
  auto loader = td::make_data_loader(stacked(), sampler, 2);
  auto iterator = loader->begin();
  EXPECT_EQ(iterator->data.numel(), 2);
  std::multiset<std::int64_t> rest;
  for (const int rank : {0, 1}) {  // in place of three
    DataLoader other(set, DistributedSampler(kSize, {.num_replicas = 2, .rank = rank}));
    other.load_state_dict(sampler.state_dict(*loader));
    for (auto& [number, negative] : other) rest.insert(number.item<std::int64_t>());
  }
  EXPECT_THAT(rest, SizeIs(kSize - 6));
  EXPECT_THAT(std::set(rest.begin(), rest.end()), SizeIs(kSize - 6));
}

TEST(TorchSampler, IsSavedAsLibTorchsAre) {
  auto sampler = distributed(kSize, {.num_replicas = 2, .rank = 0, .shuffle = false});
  sampler.reset();
  sampler.next(5);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  auto other = distributed(kSize, {.num_replicas = 2, .rank = 0, .shuffle = false});
  other.load(in);
  other.reset();
  EXPECT_THAT(*other.next(2), ElementsAre(10, 12));
}

TEST(TorchSampler, RefusesWhatItCannotDo) {
  auto sampler = distributed(kSize, {.num_replicas = 1, .rank = 0});
  EXPECT_THAT([&] { sampler.reset(5); }, ThrowsMessage<UsageError>(HasSubstr("cannot have 5")));
  EXPECT_THAT([&] { sampler.load_state_dict(1); },
              ThrowsMessage<UsageError>(HasSubstr("no state of a loader")));
  EXPECT_THAT([] { TorchSampler(std::shared_ptr<Sampler>()); },
              ThrowsMessage<UsageError>(HasSubstr("null")));
  EXPECT_THAT([] { DistributedSampler(std::shared_ptr<Sampler>(), {}); },
              ThrowsMessage<UsageError>(HasSubstr("null")));
  for (const at::IValue& samples : {at::IValue(-5), at::IValue("five")}) {
    std::stringstream file;
    torch::serialize::OutputArchive out;
    out.write("epoch", at::IValue(0));
    out.write("samples", samples);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    EXPECT_THROW(sampler.load(in), UsageError);
  }
  auto loader = td::make_data_loader(stacked(), sampler,
                                     td::DataLoaderOptions(5).workers(2).enforce_ordering(false));
  EXPECT_EQ(iterate(*loader).size(), 5U);
  EXPECT_THAT([&] { sampler.state_dict(*loader); },
              ThrowsMessage<UsageError>(HasSubstr("enforce_ordering(false)")));
}

// Each of them is as LibTorch's own loader has it.
TEST(DataLoader, TakesAnyStatelessDataSetOfLibTorch) {
  const auto doubled = td::transforms::Lambda<td::Example<>>(
      [](td::Example<> example) { return td::Example<>(example.data * 2, example.target); });
  for (const int workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 9, .num_workers = workers};
    Numbers plain;
    DataLoader of_plain(plain, SequentialSampler(kSize), options);
    auto collated = Numbers().map(doubled).map(td::transforms::Stack<>());
    DataLoader of_collated(collated, SequentialSampler(kSize), options);
    auto mapped = Numbers().map(doubled);
    DataLoader of_mapped(mapped, SequentialSampler(kSize), options);
    const auto count = [](const std::vector<td::Example<>>& samples) { return samples.size(); };
    DataLoader counts(mapped, SequentialSampler(kSize), options, count);
    auto theirs = td::make_data_loader<td::samplers::SequentialSampler>(collated, 9);
    auto mapped_at = of_mapped.begin();
    auto plain_at = of_plain.begin();
    auto count_at = counts.begin();
    auto their = theirs->begin();
    for (auto& [data, target] : of_collated) {
      EXPECT_TRUE(data.equal(their->data));
      EXPECT_TRUE(target.equal(their->target));
      EXPECT_TRUE((*mapped_at).first.equal(data));
      EXPECT_TRUE(((*plain_at).first * 2).equal(data));
      EXPECT_EQ(*count_at, static_cast<std::size_t>(data.size(0)));
      ++mapped_at, ++plain_at, ++count_at, ++their;
    }
    EXPECT_TRUE(mapped_at == of_mapped.end());
  }
}

}  // namespace
}  // namespace paceline::data
