#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "shm/buckets/bucket_reducer.h"
#include "support/elements.h"
#include "support/fake_second_level.h"

// Steps of bucket reducers on several nodes, and what they must result in.
namespace paceline::test::nodes {

inline constexpr shm::Bucket kBuckets[] = {{1000, shm::DataType::float32, shm::ReduceOp::avg},
                                           {5, shm::DataType::float32, shm::ReduceOp::avg},
                                           {3333, shm::DataType::float64, shm::ReduceOp::sum},
                                           {500, shm::DataType::uint8, shm::ReduceOp::max},
                                           {777, shm::DataType::float16, shm::ReduceOp::avg},
                                           {130, shm::DataType::bfloat16, shm::ReduceOp::avg}};
inline constexpr std::size_t kCount = std::size(kBuckets);

inline std::string bucket_name(std::size_t bucket) {
  return "layer" + std::to_string(bucket);
}

// Small multiples of 1/8, which every type holds exactly; 0 or 1 in a bitmap.
inline double value_of(int index, std::size_t step, std::size_t bucket, std::size_t i) {
  const auto mixed = static_cast<int>((i * 7 + step * 3 + bucket * 5) % 11) + 13 * index;
  if (kBuckets[bucket].op == shm::ReduceOp::max) return mixed % 4 == 0 ? 1 : 0;
  return (mixed % 31 - 15) / 8.0;
}

inline void fill(const shm::BucketReducer& reducer, std::size_t bucket, int index,
                 std::size_t step) {
  void* const data = reducer.data(bucket).get();
  for (std::size_t i = 0; i < kBuckets[bucket].count; ++i) {
    put(kBuckets[bucket].type, data, i, value_of(index, step, bucket, i));
  }
}

inline void expect_reduced(const shm::BucketReducer& reducer, std::size_t bucket, std::size_t step,
                           const std::vector<double>& weights) {
  const auto& [count, type, op] = kBuckets[bucket];
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (std::size_t index = 0; index < weights.size(); ++index) {
      const double value = value_of(static_cast<int>(index), step, bucket, i);
      if (op == shm::ReduceOp::max) sum = std::max(sum, value);
      if (op == shm::ReduceOp::sum) sum += value;
      if (op == shm::ReduceOp::avg) sum += value * weights[index] / total;
    }
    ASSERT_NEAR(get(type, reducer.data(bucket).get(), i).real(), sum, tolerance(type, 4))
        << "bucket " << bucket << " at " << i << " in step " << step;
  }
}

// What every rank has after every step, to be compared in the end.
class Results {
 public:
  explicit Results(std::size_t ranks) : by_rank_(ranks) {}

  void add(int index, const shm::BucketReducer& reducer, std::size_t bucket) {
    const std::size_t bytes = kBuckets[bucket].count * shm::element_size(kBuckets[bucket].type);
    const std::byte* const data = reducer.data(bucket).get();
    auto& all = by_rank_[static_cast<std::size_t>(index)];
    all.insert(all.end(), data, data + bytes);
  }
  void expect_the_same_everywhere() const {
    ASSERT_FALSE(by_rank_[0].empty());
    for (const auto& one : by_rank_) EXPECT_TRUE(one == by_rank_[0]);
  }

 private:
  std::vector<std::vector<std::byte>> by_rank_;
};

inline std::size_t ranks_of(const FakeNetwork& network) {
  std::size_t ranks = 0;
  for (const auto& node : network.nodes()) ranks += node.size();
  return ranks;
}

inline void publish_all(shm::BucketReducer& reducer, int index, std::size_t step,
                        std::mt19937& random) {
  std::vector<std::size_t> order(kCount);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t bucket : order) {
    fill(reducer, bucket, index, step);
    reducer.publish(bucket);
    if (random() % 2 == 0) reducer.try_progress();
  }
}

inline void run_step(shm::BucketReducer& reducer, const FakeNetwork& network, int index,
                     std::size_t step) {
  std::mt19937 random(static_cast<unsigned>(index + 100 * static_cast<int>(step)));
  reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
  publish_all(reducer, index, step, random);
  reducer.finish();
  const std::vector<double> weights(ranks_of(network), 1.0);
  for (std::size_t b = 0; b < kCount; ++b) expect_reduced(reducer, b, step, weights);
}

// Runs steps until an error, which is expected of every rank.
template <typename ErrorType, typename Check>
void expect_error(const std::function<void()>& steps, Check check) {
  try {
    steps();
    ADD_FAILURE() << "no error";
  } catch (const ErrorType& error) {
    check(error);
  }
}

template <typename Body>
void for_all_jobs(Body body) {
  for (const std::vector<int>& sizes : {std::vector{1}, {2, 2}, {1, 3}, {3, 2, 1}}) {
    const int most = *std::ranges::min_element(sizes);
    for (int lanes = 1; lanes <= most; ++lanes) {
      FakeNetwork network(sizes, lanes);
      body(network);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace paceline::test::nodes
