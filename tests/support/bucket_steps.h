#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "shm/buckets/bucket_reducer.h"

// Steps of a reducer of three buckets, and what they must result in.
namespace paceline::test {

inline std::string bucket_name(std::size_t bucket) {
  return "layer" + std::to_string(bucket);
}

inline constexpr shm::BucketReducer::Bucket kBuckets[] = {
    {5, shm::DataType::float32, shm::ReduceOp::avg},
    {40000, shm::DataType::float64, shm::ReduceOp::sum},
    {64, shm::DataType::int64, shm::ReduceOp::max}};

inline double value_of(int rank, std::size_t step, std::size_t bucket) {
  return static_cast<double>(10 * rank + static_cast<int>(step % 7) + static_cast<int>(bucket));
}

template <typename T>
void fill(const shm::BucketReducer& reducer, std::size_t bucket, double value) {
  auto* const data = reinterpret_cast<T*>(reducer.data(bucket).get());
  std::fill_n(data, kBuckets[bucket].count, static_cast<T>(value));
}
template <typename T>
void expect(const shm::BucketReducer& reducer, std::size_t bucket, double value) {
  const auto* const data = reinterpret_cast<const T*>(reducer.data(bucket).get());
  for (std::size_t i = 0; i < kBuckets[bucket].count; ++i) {
    ASSERT_DOUBLE_EQ(static_cast<double>(data[i]), value) << "bucket " << bucket << " at " << i;
  }
}

inline void fill_bucket(const shm::BucketReducer& reducer, std::size_t bucket, double value) {
  if (bucket == 0) fill<float>(reducer, bucket, value);
  if (bucket == 1) fill<double>(reducer, bucket, value);
  if (bucket == 2) fill<std::int64_t>(reducer, bucket, value);
}

inline void check_step(const shm::BucketReducer& reducer, int size, std::size_t step) {
  double sum[3] = {0, 0, 0};
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t b = 0; b < 3; ++b) sum[b] += value_of(rank, step, b);
  }
  expect<float>(reducer, 0, static_cast<float>(sum[0]) / static_cast<float>(size));
  expect<double>(reducer, 1, sum[1]);
  expect<std::int64_t>(reducer, 2, value_of(size - 1, step, 2));
}

inline void run_step(shm::BucketReducer& reducer, const shm::Region& region, std::size_t step,
                     std::mt19937& random) {
  std::vector<std::size_t> order{0, 1, 2};
  std::shuffle(order.begin(), order.end(), random);
  reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
  for (const std::size_t bucket : order) {
    fill_bucket(reducer, bucket, value_of(region.rank(), step, bucket));
    reducer.publish(bucket);
    if (random() % 2 == 0) reducer.try_progress();
  }
  reducer.finish();
  check_step(reducer, region.size(), step);
}

}  // namespace paceline::test
