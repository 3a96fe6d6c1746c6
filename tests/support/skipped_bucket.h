#pragma once

#include <atomic>
#include <cstddef>

#include "shm/buckets/bucket_reducer.h"

namespace paceline::test {

// Three steps, in the second of which all ranks but rank 1 use bucket 0. Rank 1 skips it, does not
// wait for it, and comes to the third step, where it skips the bucket again or uses it, before rank
// 0 publishes it in the second. `ahead`: false, and shared by the ranks.
inline void skip_a_bucket_that_others_use(shm::BucketReducer& reducer, int rank,
                                          std::size_t buckets, bool skips_again,
                                          std::atomic<bool>& ahead) {
  const auto publish_from = [&](std::size_t first) {
    for (std::size_t bucket = first; bucket < buckets; ++bucket) reducer.publish(bucket);
  };
  reducer.begin_step({.forwards = 1});
  publish_from(0);
  reducer.finish();
  reducer.begin_step({.forwards = 2});
  publish_from(1);
  if (rank != 1) {
    while (rank == 0 && !ahead) reducer.try_progress();
    reducer.publish(0);
    return reducer.finish();
  }
  reducer.skip(0);
  reducer.finish();
  reducer.begin_step({.forwards = 3});
  skips_again ? reducer.skip(0) : reducer.publish(0);
  ahead = true;
  publish_from(1);
  reducer.finish();
}

}  // namespace paceline::test
