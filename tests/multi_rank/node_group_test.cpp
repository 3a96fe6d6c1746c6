#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <paceline/error.h>

#include "node/group.h"
#include "support/process_ranks.h"
#include "support/reduction.h"
#include "support/thread_ranks.h"

namespace paceline::node {
namespace {

using test::kWorldSizes;
using test::run_thread_ranks;
using test::small_region;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::size_t kCounts[] = {0, 1, 3, 63, 64, 65, 20000};
constexpr std::size_t kLargeCount = 1'000'001;

// The same on every call, another for each rank and element.
double value_of(int rank, std::size_t i) {
  return static_cast<double>((i * 2654435761u + static_cast<std::size_t>(rank) * 40503u) % 2001) /
             8.0 -
         125.0;
}

std::uint16_t to_bfloat16(double value) {
  const auto number = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}
double from_bfloat16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// How a test reads and writes elements of a type.
void put(DataType type, void* at, std::size_t i, double value) {
  switch (type) {
    case DataType::float32:
      static_cast<float*>(at)[i] = static_cast<float>(value);
      break;
    case DataType::float64:
      static_cast<double*>(at)[i] = value;
      break;
    case DataType::bfloat16:
      static_cast<std::uint16_t*>(at)[i] = to_bfloat16(value);
      break;
    case DataType::int64:
      static_cast<std::int64_t*>(at)[i] = std::llround(value);
      break;
    default:
      break;
  }
}
double get(DataType type, const void* at, std::size_t i) {
  switch (type) {
    case DataType::float32:
      return static_cast<const float*>(at)[i];
    case DataType::float64:
      return static_cast<const double*>(at)[i];
    case DataType::bfloat16:
      return from_bfloat16(static_cast<const std::uint16_t*>(at)[i]);
    case DataType::int64:
      return static_cast<double>(static_cast<const std::int64_t*>(at)[i]);
    default:
      break;
  }
  return 0;
}
// The value as the type holds it.
double held(DataType type, double value) {
  alignas(8) std::byte cell[8];
  put(type, cell, 0, value);
  return get(type, cell, 0);
}
double tolerance(DataType type, double magnitude) {
  switch (type) {
    case DataType::float32:
      return magnitude * 1e-6;
    case DataType::float64:
      return magnitude * 1e-14;
    case DataType::bfloat16:
      return magnitude / 200;
    default:
      return 0;
  }
}

double expected_reduction(DataType type, ReduceOp op, int size, std::size_t i) {
  return test::reduced(op, size, [&](int rank) { return held(type, value_of(rank, i)); });
}

void check_all_reduce(Group& group, DataType type, ReduceOp op, std::size_t count) {
  const std::size_t bytes = count * element_size(type);
  std::vector<std::byte> ordinary(bytes);
  std::vector<std::byte> separate(bytes);
  void* const shared = group.region()->allocate(bytes);
  ASSERT_NE(shared, nullptr);
  for (std::size_t i = 0; i < count; ++i) {
    put(type, ordinary.data(), i, value_of(group.rank(), i));
    put(type, shared, i, value_of(group.rank(), i));
  }
  group.all_reduce(ordinary.data(), separate.data(), count, type, op);
  group.all_reduce(ordinary.data(), ordinary.data(), count, type, op);
  group.all_reduce(shared, shared, count, type, op);
  const double allowed = tolerance(type, 125.0 * group.size());
  for (std::size_t i = 0; i < count; ++i) {
    const double expected = expected_reduction(type, op, group.size(), i);
    const double got = get(type, shared, i);
    // gtest's own comparison costs more than the reduction.
    if (!(std::abs(got - expected) <= allowed)) {
      FAIL() << name(type) << ' ' << name(op) << ' ' << count << " element " << i << ": " << got
             << " instead of " << expected;
    }
  }
  if (bytes > 0) {
    EXPECT_EQ(std::memcmp(shared, ordinary.data(), bytes), 0) << "staged differs from shared";
    EXPECT_EQ(std::memcmp(shared, separate.data(), bytes), 0) << "in place differs";
  }
  group.region()->free(shared);
}

TEST(Group, AllReduceEveryTypeOperationAndSize) {
  for (const int size : kWorldSizes) {
    run_thread_ranks(size, [](auto region) {
      Group group(region);
      for (const DataType type :
           {DataType::float32, DataType::float64, DataType::bfloat16, DataType::int64}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max}) {
          if (type == DataType::int64 && op == ReduceOp::avg) continue;
          for (const std::size_t count : kCounts) check_all_reduce(group, type, op, count);
        }
        // The path depends on the size alone, so one operation is enough for the largest.
        check_all_reduce(group, type, ReduceOp::sum, kLargeCount);
      }
    });
  }
}

TEST(Group, AllReduceWhereOnlySomeTensorsAreShared) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    constexpr std::size_t kCount = 50000;
    std::vector<float> ordinary(kCount);
    auto* const shared = static_cast<float*>(region->allocate(kCount * sizeof(float)));
    float* const mine = region->rank() == 1 ? ordinary.data() : shared;
    for (std::size_t i = 0; i < kCount; ++i) mine[i] = static_cast<float>(region->rank() + 1);
    group.all_reduce(mine, mine, kCount, DataType::float32, ReduceOp::sum);
    EXPECT_EQ(std::accumulate(mine, mine + kCount, 0.0), 6.0 * kCount);
  });
}

TEST(Group, BroadcastEverySizeAndRoot) {
  for (const int size : kWorldSizes) {
    run_thread_ranks(size, [](auto region) {
      Group group(region);
      for (const std::size_t count : {0u, 1u, 65u, 20000u, 100'001u}) {
        for (int root = 0; root < group.size(); ++root) {
          for (const bool in_region : {false, true}) {
            std::vector<float> ordinary(count);
            void* const shared = region->allocate(count * sizeof(float));
            float* const data = in_region ? static_cast<float*>(shared) : ordinary.data();
            for (std::size_t i = 0; i < count; ++i) {
              data[i] = group.rank() == root ? static_cast<float>(value_of(root, i)) : -1.0f;
            }
            group.broadcast(data, count, DataType::float32, root);
            for (std::size_t i = 0; i < count; ++i) {
              if (data[i] != static_cast<float>(value_of(root, i))) FAIL() << count << ' ' << i;
            }
            group.barrier();
            region->free(shared);
          }
        }
      }
    });
  }
}

TEST(Group, AllGatherEverySize) {
  for (const int size : kWorldSizes) {
    run_thread_ranks(size, [](auto region) {
      Group group(region);
      for (const std::size_t count : {0u, 1u, 65u, 20000u, 100'001u}) {
        for (const bool in_region : {false, true}) {
          std::vector<double> ordinary(count);
          void* const shared = region->allocate(count * sizeof(double));
          double* const mine = in_region ? static_cast<double*>(shared) : ordinary.data();
          for (std::size_t i = 0; i < count; ++i) mine[i] = value_of(group.rank(), i);
          std::vector<std::vector<double>> gathered(static_cast<std::size_t>(group.size()),
                                                    std::vector<double>(count));
          std::vector<void*> outputs;
          for (auto& one : gathered) outputs.push_back(one.data());
          group.all_gather(mine, outputs, count, DataType::float64);
          for (int rank = 0; rank < group.size(); ++rank) {
            for (std::size_t i = 0; i < count; ++i) {
              const double got = gathered[static_cast<std::size_t>(rank)][i];
              if (got != value_of(rank, i)) FAIL() << "rank " << rank << " element " << i;
            }
          }
          region->free(shared);
        }
      }
    });
  }
}

TEST(Group, ReduceScatterEveryTypeAndSize) {
  for (const int size : kWorldSizes) {
    run_thread_ranks(size, [](auto region) {
      Group group(region);
      for (const DataType type :
           {DataType::float32, DataType::float64, DataType::bfloat16, DataType::int64}) {
        const ReduceOp op = type == DataType::int64 ? ReduceOp::max : ReduceOp::avg;
        for (const std::size_t count : {0u, 1u, 3u, 63u, 64u, 65u, 20000u, 100'001u}) {
          const auto ranks = static_cast<std::size_t>(group.size());
          std::vector<std::byte> input(ranks * count * element_size(type));
          for (std::size_t i = 0; i < ranks * count; ++i) {
            put(type, input.data(), i, value_of(group.rank(), i));
          }
          std::vector<const void*> parts;
          for (std::size_t r = 0; r < ranks; ++r) {
            parts.push_back(input.data() + r * count * element_size(type));
          }
          std::vector<std::byte> output(count * element_size(type));
          group.reduce_scatter(parts, output.data(), count, type, op);
          for (std::size_t i = 0; i < count; ++i) {
            const std::size_t element = static_cast<std::size_t>(group.rank()) * count + i;
            ASSERT_NEAR(get(type, output.data(), i),
                        expected_reduction(type, op, group.size(), element),
                        tolerance(type, 125.0 * group.size()));
          }
        }
      }
    });
  }
}

// Any operation may follow any other with nothing in between.
TEST(Group, RandomSequencesOfCalls) {
  for (const int size : kWorldSizes) {
    run_thread_ranks(size, [](auto region) {
      Group group(region);
      std::mt19937 random(11);  // the same on every rank
      for (int call = 0; call < 600; ++call) {
        const std::size_t count = random() % 3 == 0 ? random() % 60000 : random() % 100;
        const int root = static_cast<int>(random() % static_cast<unsigned>(group.size()));
        std::vector<double> data(count);
        for (std::size_t i = 0; i < count; ++i) data[i] = value_of(group.rank(), i + count);
        switch (random() % 3) {
          case 0:
            group.broadcast(data.data(), count, DataType::float64, root);
            for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], value_of(root, i + count));
            break;
          case 1:
            group.all_reduce(data.data(), data.data(), count, DataType::float64, ReduceOp::max);
            for (std::size_t i = 0; i < count; ++i) {
              ASSERT_EQ(data[i], expected_reduction(DataType::float64, ReduceOp::max, group.size(),
                                                    i + count));
            }
            break;
          default:
            group.barrier();
        }
      }
    });
  }
}

TEST(Group, WorksBetweenProcesses) {
  for (const int size : kWorldSizes) {
    test::expect_process_ranks(size, [size](int rank, Links links) {
      Group group(Region::create(std::move(links), rank, size, small_region()));
      for (const std::size_t count : {1u, 100u, 300'000u}) {
        check_all_reduce(group, DataType::float32, ReduceOp::avg, count);
      }
      for (int i = 0; i < 1000; ++i) check_all_reduce(group, DataType::int64, ReduceOp::sum, 5);
    });
  }
}

std::string mismatch(int size, const std::function<void(Group&)>& call,
                     std::vector<int>* culprits = nullptr) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  run_thread_ranks(size, [&](auto region) {
    Group group(region);
    group.barrier();
    auto& text = texts[static_cast<std::size_t>(region->rank())];
    try {
      call(group);
      text = "no error";
    } catch (const Mismatch& error) {
      text = error.what();
      EXPECT_EQ(error.sequence(), 2u);
      if (culprits != nullptr && region->rank() == 0) *culprits = error.ranks();
    }
    EXPECT_THROW(group.barrier(), Mismatch) << "a failed group must refuse further calls";
  });
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

TEST(Group, RanksAreCalledByTheirNumbersInTheWorld) {
  auto options = small_region();
  options.numbers = RankNumbers({4, 7, 9});
  run_thread_ranks(
      3,
      [](auto region) {
        Group group(region);
        std::vector<float> data(8);
        const std::size_t count = group.rank() == 1 ? 5 : 8;
        try {
          group.all_reduce(data.data(), data.data(), count, DataType::float32, ReduceOp::sum);
          ADD_FAILURE() << "no error";
        } catch (const Mismatch& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(7));
          EXPECT_THAT(error.what(),
                      HasSubstr("ranks 4 and 9 called all_reduce of 8 float32, rank 7 "
                                "all_reduce of 5 float32"));
        }
      },
      options);
}

TEST(Group, DifferentCallsAreNamedOnEveryRank) {
  std::vector<float> data(100);
  std::vector<std::vector<float>> own(3, std::vector<float>(100));
  const auto mine = [&](Group& group) {
    return own[static_cast<std::size_t>(group.rank())].data();
  };
  EXPECT_EQ(mismatch(2,
                     [&](Group& group) {
                       const std::size_t count = group.rank() == 0 ? 10 : 12;
                       group.all_reduce(mine(group), mine(group), count, DataType::float32,
                                        ReduceOp::sum);
                     }),
            "rank 0 called all_reduce of 10 float32, rank 1 all_reduce of 12 float32; call 2 of "
            "group test");
  std::vector<int> culprits;
  EXPECT_EQ(mismatch(
                3,
                [&](Group& group) {
                  if (group.rank() == 1) {
                    group.broadcast(mine(group), 5, DataType::byte, 1);
                  } else {
                    group.barrier();
                  }
                },
                &culprits),
            "ranks 0 and 2 called barrier, rank 1 broadcast of 5 bytes from rank 1; call 2 of "
            "group test");
  EXPECT_THAT(culprits, ElementsAre(1));
  EXPECT_THAT(mismatch(2,
                       [&](Group& group) {
                         group.all_reduce(mine(group), mine(group), 4, DataType::float32,
                                          group.rank() == 0 ? ReduceOp::max : ReduceOp::avg);
                       }),
              HasSubstr("with MAX, rank 1 all_reduce of 4 float32 with AVG"));
}

TEST(Group, ALateRankIsNamedAtTheDeadline) {
  run_thread_ranks(
      3,
      [](auto region) {
        Group group(region);
        group.barrier();
        if (region->rank() == 1) {
          // Comes only once the others have given up.
          while (!region->failed()) std::this_thread::yield();
          EXPECT_THROW(group.barrier(), Timeout);
          return;
        }
        try {
          group.barrier();
          ADD_FAILURE() << "a barrier of two out of three";
        } catch (const Timeout& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(1));
          EXPECT_STREQ(error.what(),
                       "rank 1 did not arrive within 0.2 s at barrier, call 2 of group test");
        }
      },
      small_region(std::chrono::milliseconds(200)));
}

TEST(Group, ARankThatLeftIsNamed) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    group.barrier();
    if (region->rank() == 1) return;
    region.reset();
    try {
      group.barrier();
      ADD_FAILURE() << "a barrier alone";
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(1));
      EXPECT_STREQ(error.what(),
                   "rank 1 has left the group and is missing in barrier, call 2 of group test");
    }
  });
}

TEST(Group, AnAbortReachesTheOthersWithItsText) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    group.barrier();
    if (region->rank() == 2) return region->abort("disk full");
    try {
      group.barrier();
      ADD_FAILURE() << "a barrier with a rank that aborted";
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(2));
      EXPECT_STREQ(error.what(), "rank 2 left the group with an exception: disk full");
    }
  });
}

TEST(Group, UnusableArgumentsAreRefusedBeforeAnybodyIsInvolved) {
  run_thread_ranks(1, [](auto region) {
    Group group(region);
    std::int64_t x = 0;
    EXPECT_THROW(group.all_reduce(&x, &x, 1, DataType::int64, ReduceOp::avg), UsageError);
    EXPECT_THROW(group.all_reduce(&x, &x, 1, DataType::byte, ReduceOp::sum), UsageError);
    EXPECT_THROW(group.broadcast(&x, 1, DataType::int64, 1), UsageError);
    EXPECT_EQ(group.sequence(), 0u);
  });
}

TEST(Slice, CoversEverythingOnceOnCacheLines) {
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 1000u, 12345u}) {
    for (const int size : {1, 2, 3, 5, 8}) {
      std::size_t at = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Slice slice = slice_of(count, 4, rank, size);
        EXPECT_EQ(slice.begin, at);
        EXPECT_TRUE(slice.begin % 16 == 0 || slice.begin == count);
        at = slice.end;
      }
      EXPECT_EQ(at, count);
    }
  }
}

}  // namespace
}  // namespace paceline::node
