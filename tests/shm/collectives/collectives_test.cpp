#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

#include "base/cores.h"
#include "shm/collectives/group.h"
#include "support/cases.h"
#include "support/elements.h"
#include "support/process_ranks.h"
#include "support/refuse_call.h"
#include "support/shared.h"
#include "support/thoroughness.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::get;
using test::held;
using test::kAllOps;
using test::kAllTypes;
using test::kWorldSizes;
using test::run_thread_ranks;
using test::small_region;
using test::thoroughness;
using test::Value;

// A call as all ranks know it; what each gives and gets follows from it.
struct Case {
  Operation operation = Operation::barrier;
  DataType type = DataType::float32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::size_t count = 0;
  bool uneven = false;
  bool shared = false;    // memory of the region
  bool in_place = false;  // where the operation allows it
  unsigned seed = 0;

  // Elements that rank `from` gives to rank `to`.
  std::size_t count_of(int from, int to) const {
    if (!uneven) return count;
    const unsigned a = operation == Operation::reduce_scatter ? 0 : static_cast<unsigned>(from) + 1;
    const unsigned b = operation == Operation::all_gather ? 0 : static_cast<unsigned>(to) + 1;
    return (a * 7919u + b * 104729u + seed) % (count + 1);
  }
  // Small integers, so that results are exact or nearly so in every type.
  Value value_of(int from, int to, std::size_t i) const {
    const std::size_t hash = (i + 1) * 2654435761u + static_cast<std::size_t>(from) * 40503u +
                             static_cast<std::size_t>(to) * 9176u + seed;
    const bool is_signed = type != DataType::uint8 && type != DataType::boolean;
    const double real = static_cast<double>(hash / 64 % 7) - 3;
    const bool complex = type == DataType::complex64 || type == DataType::complex128;
    return held(type, {is_signed ? real : std::abs(real),
                       complex ? static_cast<double>(hash / 512 % 5) - 2 : 0});
  }
  Value reduced(int size, int to, std::size_t i) const {
    std::vector<Value> values;
    for (int from = 0; from < size; ++from) values.push_back(value_of(from, to, i));
    return test::reduced(type, op, values);
  }
};

std::string describe(const Case& one) {
  return describe(CollectiveFingerprint{.operation = one.operation,
                                        .type = one.type,
                                        .op = one.op,
                                        .uneven = one.uneven,
                                        .root = one.root,
                                        .count = one.count},
                  {}) +
         (one.shared ? ", shared" : "") + (one.in_place ? ", in place" : "");
}

// Parts of memory for one call, in the region or not, filled with a pattern that no result has.
class Parts {
 public:
  Parts(Region& region, const Case& one) : region_(region), case_(one) {}
  ~Parts() {
    for (void* const block : blocks_) region_.memory().free(block);
  }
  void add(std::size_t count) {
    counts_.push_back(count);
    total_ += count;
  }
  // Until then no part has its address: parts follow one another.
  void allocate() {
    const std::size_t bytes = total_ * element();
    if (case_.shared) {
      blocks_.push_back(region_.memory().allocate(bytes));
      data_ = static_cast<std::byte*>(blocks_.back());
    } else {
      ordinary_.resize(bytes);
      data_ = ordinary_.data();
    }
    ASSERT_TRUE(data_ != nullptr || bytes == 0);
    std::fill_n(data_, bytes, std::byte{0x2a});
  }
  void fill(int part, const std::function<Value(std::size_t)>& value) {
    for (std::size_t i = 0; i < counts_[static_cast<std::size_t>(part)]; ++i) {
      test::put(case_.type, at(part), i, value(i));
    }
  }
  void expect(int part, const std::function<Value(std::size_t)>& value, double looseness) {
    for (std::size_t i = 0; i < counts_[static_cast<std::size_t>(part)]; ++i) {
      const Value expected = value(i);
      const Value got = get(case_.type, at(part), i);
      // gtest's own comparison costs more than the calls.
      if (!(std::abs(got - expected) <=
            looseness * test::tolerance(case_.type, std::abs(expected)))) {
        FAIL() << describe(case_) << ", part " << part << ", element " << i << ": " << got
               << " instead of " << expected;
      }
    }
  }
  std::byte* at(int part) const {
    const auto before = std::accumulate(counts_.begin(), counts_.begin() + part, std::size_t{0});
    return data_ + before * element();
  }
  std::vector<Input> inputs() const {
    std::vector<Input> result;
    for (const Output& output : outputs()) result.push_back({output.data, output.count});
    return result;
  }
  std::vector<Output> outputs() const {
    std::vector<Output> result;
    for (std::size_t part = 0; part < counts_.size(); ++part) {
      result.push_back({at(static_cast<int>(part)), counts_[part]});
    }
    return result;
  }
  std::size_t element() const { return element_size(case_.type); }

 private:
  Region& region_;
  const Case& case_;
  std::vector<std::size_t> counts_;
  std::size_t total_ = 0;
  std::vector<void*> blocks_;
  std::vector<std::byte> ordinary_;
  std::byte* data_ = nullptr;
};

void run_reduction(Group& group, const Case& one) {
  const bool to_all = one.operation == Operation::all_reduce;
  Parts input(*group.region(), one);
  Parts output(*group.region(), one);
  for (Parts* const parts : {&input, &output}) {
    parts->add(one.count);
    parts->allocate();
  }
  const auto own = [&](std::size_t i) { return one.value_of(group.rank(), 0, i); };
  input.fill(0, own);
  const bool result = to_all || group.rank() == one.root;
  Parts& target = one.in_place ? input : output;
  void* const to = result ? target.at(0) : nullptr;
  if (to_all) {
    group.all_reduce(input.at(0), to, one.count, one.type, one.op);
  } else {
    group.reduce(input.at(0), to, one.count, one.type, one.op, one.root);
  }
  if (result) {
    target.expect(
        0, [&](std::size_t i) { return one.reduced(group.size(), 0, i); }, 1);
  }
  if (!result || !one.in_place) input.expect(0, own, 0);
}

void run_broadcast(Group& group, const Case& one) {
  Parts data(*group.region(), one);
  data.add(one.count);
  data.allocate();
  const auto root = [&](std::size_t i) { return one.value_of(one.root, 0, i); };
  if (group.rank() == one.root) data.fill(0, root);
  group.broadcast(data.at(0), one.count, one.type, one.root);
  data.expect(0, root, 0);
}

// Those in which each rank gives a part to each: who takes part in giving and getting differs.
void run_gather_scatter(Group& group, const Case& one) {
  const int me = group.rank();
  const bool personal =
      one.operation != Operation::all_gather && one.operation != Operation::gather;
  const bool gives = one.operation != Operation::scatter || me == one.root;
  const bool gets = one.operation != Operation::gather || me == one.root;
  Parts inputs(*group.region(), one);
  Parts outputs(*group.region(), one);
  for (int to = 0; gives && to < (personal ? group.size() : 1); ++to) {
    inputs.add(one.count_of(me, to));
  }
  const bool reduces = one.operation == Operation::reduce_scatter;
  for (int from = 0; gets && from < group.size(); ++from) {
    if ((reduces && from != me) || (one.operation == Operation::scatter && from != one.root)) {
      outputs.add(0);
    } else {
      outputs.add(one.count_of(from, me));
    }
  }
  inputs.allocate();
  outputs.allocate();
  const auto to_of = [&](int to) { return personal ? to : 0; };
  const auto ins = inputs.inputs();
  const auto outs = outputs.outputs();
  for (int to = 0; to < static_cast<int>(ins.size()); ++to) {
    inputs.fill(to, [&](std::size_t i) { return one.value_of(me, to_of(to), i); });
  }
  switch (one.operation) {
    case Operation::gather:
      group.gather(ins[0], outs, one.type, one.root);
      break;
    case Operation::scatter:
      group.scatter(ins, outs[static_cast<std::size_t>(one.root)], one.type, one.root);
      break;
    case Operation::all_gather:
      group.all_gather(ins[0], outs, one.type);
      break;
    case Operation::all_to_all:
      group.all_to_all(ins, outs, one.type);
      break;
    default:
      group.reduce_scatter(ins, outs[static_cast<std::size_t>(me)], one.type, one.op);
  }
  for (int from = 0; from < static_cast<int>(outs.size()); ++from) {
    outputs.expect(
        from,
        [&](std::size_t i) {
          return reduces ? one.reduced(group.size(), me, i) : one.value_of(from, to_of(me), i);
        },
        reduces ? 1 : 0);
  }
  for (int to = 0; to < static_cast<int>(ins.size()); ++to) {
    inputs.expect(
        to, [&](std::size_t i) { return one.value_of(me, to_of(to), i); }, 0);
  }
}

void run(Group& group, const Case& one) {
  switch (one.operation) {
    case Operation::none:
    case Operation::barrier:
      return group.barrier();
    case Operation::all_reduce:
    case Operation::reduce:
      return run_reduction(group, one);
    case Operation::broadcast:
      return run_broadcast(group, one);
    default:
      return run_gather_scatter(group, one);
  }
}

bool may_be_uneven(Operation operation) {
  return operation == Operation::all_gather || operation == Operation::reduce_scatter ||
         operation == Operation::all_to_all;
}

constexpr Operation kReductions[] = {Operation::all_reduce, Operation::reduce,
                                     Operation::reduce_scatter};
constexpr Operation kGatherScatters[] = {Operation::broadcast, Operation::gather,
                                         Operation::scatter, Operation::all_gather,
                                         Operation::all_to_all};

using Collectives = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(All, Collectives, ::testing::ValuesIn(kWorldSizes), test::CaseName());

TEST_P(Collectives, ReduceEveryTypeWithEveryOperation) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    Case one;
    for (const Operation operation : kReductions) {
      for (const DataType type : kAllTypes) {
        for (const ReduceOp op : kAllOps) {
          if (!is_reducible(type, op)) continue;
          // The path depends on the size alone, and the kernels have tests of their own.
          const bool more_of_the_same =
              (op != ReduceOp::sum && op != ReduceOp::avg) ||
              (test::kSanitized && type != DataType::float32 && type != DataType::bfloat16);
          if (more_of_the_same && test::kSanitized) continue;
          for (const std::size_t count : {0u, 67u, 9'011u}) {
            if (more_of_the_same && count > 1000) continue;
            one = {.operation = operation, .type = type, .op = op, .count = count};
            one.root = group.size() - 1;
            one.in_place = count % 2 == 1;
            for (const bool shared : {false, true}) {
              one.shared = shared;
              ASSERT_NO_FATAL_FAILURE(run(group, one));
            }
          }
        }
      }
    }
  });
}

TEST_P(Collectives, MoveEverySize) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    for (const Operation operation : kGatherScatters) {
      for (const DataType type : {DataType::byte, DataType::complex128}) {
        for (const std::size_t count : {0u, 65u, 9'000u, 50'001u}) {
          if (test::kSanitized && count > 10'000) continue;  // more of the same
          // The path depends on the count alone, so large counts have two roots; under a sanitizer
          // all counts have, or it takes minutes.
          const bool all_roots = count <= 10'000 && !test::kSanitized;
          const int step = all_roots ? 1 : std::max(group.size() - 1, 1);
          for (int root = 0; root < group.size(); root += step) {
            for (const bool shared : {false, true}) {
              for (const bool uneven : {false, true}) {
                if (uneven && !may_be_uneven(operation)) continue;
                ASSERT_NO_FATAL_FAILURE(run(group, {.operation = operation,
                                                    .type = type,
                                                    .root = root,
                                                    .count = count,
                                                    .uneven = uneven,
                                                    .shared = shared}));
              }
            }
            if (operation == Operation::all_gather || operation == Operation::all_to_all) break;
          }
        }
      }
    }
  });
}

TEST(Collectives, MoveTensorsLargerThanTheCache) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "TSan does not see non-temporal stores";
#endif
  const std::size_t cache = base::last_level_cache();
  if (cache == 0 || cache > std::size_t{64} << 20) GTEST_SKIP() << "a cache of " << cache;
  run_thread_ranks(2, [&](auto region) {
    Group group(region);
    for (const Operation operation : kGatherScatters) {
      // A broadcast has two tensors of that size, the others four at least.
      const std::size_t tensors = operation == Operation::broadcast ? 2 : 4;
      if (test::kSanitized && operation != Operation::all_to_all) continue;  // more of the same
      for (const bool shared : {false, true}) {
        ASSERT_NO_FATAL_FAILURE(run(group, {.operation = operation,
                                            .type = DataType::complex128,
                                            .root = 1,
                                            .count = cache / tensors / sizeof(Value) + 3,
                                            .shared = shared}));
      }
    }
  });
}

// A program is the same on every rank: all of it follows from the seed.
void run_program(Group& group, unsigned seed, int calls, std::size_t most) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random()) % limit; };
  for (int call = 0; call < calls; ++call) {
    Case one;
    one.operation = static_cast<Operation>(1 + below(9));
    one.type = kAllTypes[below(std::size(kAllTypes))];
    one.op = kAllOps[below(std::size(kAllOps))];
    one.root = static_cast<int>(below(static_cast<std::size_t>(group.size())));
    one.count = below(3) == 0 ? below(most) : below(100);
    one.uneven = may_be_uneven(one.operation) && below(2) == 0;
    const bool mixed = below(4) == 0;
    one.shared = below(2) == 0;
    one.in_place = below(2) == 0;
    one.seed = static_cast<unsigned>(below(1000));
    // Not a matter of the program: each rank keeps its tensors where it likes.
    if (mixed) one.shared = (one.seed + static_cast<unsigned>(group.rank())) % 2 == 0;
    if (!is_reducible(one.type, one.op)) one.op = ReduceOp::sum;
    ASSERT_NO_FATAL_FAILURE(run(group, one)) << "program " << seed << ", call " << call;
  }
}

// Enough for a sanitizer to see every path; release builds compare more results.
constexpr int kCalls = test::kSanitized ? 60 : 200;

TEST_P(Collectives, GiveTheirResultsInRandomProgramsOfThreads) {
  const int size = GetParam();
  for (int seed = 0; seed < thoroughness(); ++seed) {
    run_thread_ranks(size, [&](auto region) {
      Group group(region);
      run_program(group, static_cast<unsigned>(100 * seed + size), kCalls, 30'000);
    });
  }
}

TEST_P(Collectives, GiveTheirResultsInRandomProgramsOfProcesses) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "TSan sees no race between processes";
#endif
  constexpr std::size_t kLargest = test::kSanitized ? 30'000 : 100'000;
  const int size = GetParam();
  for (int seed = 0; seed < thoroughness(); ++seed) {
    test::expect_process_ranks(size, [&](int rank, BootstrapSockets sockets) {
      RegionOptions options = small_region();
      // By one copy or two, from one call to the next.
      if (seed % 2 == 0) options.single_copy_bytes = 500;
      Group group(Region::create(std::move(sockets), rank, size, options));
      run_program(group, static_cast<unsigned>(100 * seed + 50 + size), kCalls, kLargest);
    });
  }
}

// Calls whose parts are read from the memory of their ranks' processes; where `shared`, the parts
// of the rank `root` are in shared memory. Uneven parts may be too small for it.
std::vector<Case> cases_of_one_copy(int size) {
  std::vector<Case> cases;
  for (const Operation operation : {Operation::scatter, Operation::all_to_all}) {
    for (const bool uneven : {false, true}) {
      if (uneven && !may_be_uneven(operation)) continue;
      for (const bool shared : {false, true}) {
        cases.push_back({.operation = operation,
                         .type = DataType::int64,
                         .root = size - 1,
                         .count = 9'001,
                         .uneven = uneven,
                         .shared = shared});
      }
    }
  }
  return cases;
}

void run_one_copy(Group& group, Case one) {
  one.shared = one.shared && group.rank() == one.root;
  run(group, one);
}

TEST_P(Collectives, MovePartsByOneCopy) {
  const int size = GetParam();
  RegionOptions options = small_region();
  options.single_copy_bytes = 4096;
  run_thread_ranks(
      size,
      [&](auto region) {
        Group group(region);
        for (const Case& one : cases_of_one_copy(size)) run_one_copy(group, one);
      },
      options);
  test::expect_process_ranks(size, [&](int rank, BootstrapSockets sockets) {
    Group group(Region::create(std::move(sockets), rank, size, options));
    for (const Case& one : cases_of_one_copy(size)) run_one_copy(group, one);
  });
}

// Whether a scatter leaves the staging buffers of the rank that gives the parts as they are.
bool uses_no_staging(int size, std::optional<std::size_t> single_copy_bytes) {
  RegionOptions options = small_region();
  options.single_copy_bytes = single_copy_bytes;
  const auto regions = test::make_thread_regions(size, options);
  run_thread_ranks(regions, [](auto region) {
    Group group(region);
    run(group, {.operation = Operation::scatter, .count = 1'100'000});
  });
  const std::byte* const buffer = regions[0]->memory().staging(0, 0);
  const std::byte* const end =
      buffer + Layout::kStagingBuffers * regions[0]->memory().buffer_bytes();
  return std::all_of(buffer, end, [](std::byte byte) { return byte == std::byte{0}; });
}

TEST(Collectives, MovePartsByOneCopyOnRequestOrIfRanksHaveCores) {
  if (!test::may_read_process(::getpid())) GTEST_SKIP() << "the system forbids it";
  EXPECT_TRUE(uses_no_staging(2, 4'400'000));
  EXPECT_FALSE(uses_no_staging(2, 4'400'001));
  EXPECT_FALSE(uses_no_staging(2, {}));
  const int cores = base::available_cores();
  EXPECT_EQ(uses_no_staging(3, {}), cores >= 3);
  EXPECT_FALSE(uses_no_staging(std::min(cores + 1, kMaxRanks), {}) && cores < kMaxRanks);
}

TEST_P(Collectives, MovePartsByTwoCopiesWhereARankMayNotReadAnothersMemory) {
  const int size = GetParam();
  RegionOptions options = small_region();
  options.single_copy_bytes = 4096;
  const test::Shared<std::atomic<bool>> skipped;
  for (const Case& one : cases_of_one_copy(size)) {
    test::expect_process_ranks(size, [&](int rank, BootstrapSockets sockets) {
      Group group(Region::create(std::move(sockets), rank, size, options));
      if (rank == size / 2 && !test::refuse_call(SYS_process_vm_readv)) *skipped = true;
      for (int call = 0; call < 3; ++call) ASSERT_NO_FATAL_FAILURE(run_one_copy(group, one));
    });
  }
  if (*skipped) GTEST_SKIP() << "no seccomp filters here";
}

}  // namespace
}  // namespace paceline::shm
