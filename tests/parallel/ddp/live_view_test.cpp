#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <bit>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>

#include "base/unique_fd.h"
#include "parallel/ddp/pair.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"
#include "trace/format.h"
#include "trace/live_memory.h"
#include "trace/timeline.h"

namespace paceline {
namespace {

using at::Tensor;
using test::expect_torch_ranks;
using test::input_of;
using test::make_pair;
using test::PairImpl;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;
using trace::LiveMemory;
using trace::SpanRing;

// This process's memory, as a viewer finds it.
LiveMemory& live_memory() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) != "/memfd:paceline-live (deleted)") {
      continue;
    }
    const base::UniqueFd fd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    return *static_cast<LiveMemory*>(
        ::mmap(nullptr, sizeof(LiveMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  }
  throw std::runtime_error("there is no live view");
}

void set_lease(LiveMemory& memory, std::chrono::seconds length) {
  memory.watched_until = (trace::Clock::now() + length).time_since_epoch().count();
}

// Name, step, begin and end in nanoseconds.
using SpanText = std::tuple<std::string, std::uint64_t, std::int64_t, std::int64_t>;

std::vector<SpanText> spans_in_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::vector<SpanText> spans;
  for (const auto& event : nlohmann::json::parse(file)) {
    if (event["ph"] != "X") continue;
    const auto begin = std::llround(event["ts"].get<double>() * 1000);
    spans.emplace_back(event["name"], event["args"]["step"], begin,
                       begin + std::llround(event["dur"].get<double>() * 1000));
  }
  return spans;
}

struct Shown {
  std::vector<SpanText> spans;
  std::vector<double> samples;  // after each step
  int threads = 0;
};

Shown take_shown(trace::RingReader<SpanRing>& reader) {
  Shown shown;
  reader.read([&](const SpanRing::Values& words) {
    if (words[0] == trace::kThreadRecord) {
      ++shown.threads;
      return;
    }
    const auto kind = static_cast<trace::Kind>(words[0]);
    shown.spans.emplace_back(trace::name_of(kind), words[3], static_cast<std::int64_t>(words[4]),
                             static_cast<std::int64_t>(words[5]));
    if (kind == trace::Kind::step) shown.samples.push_back(std::bit_cast<double>(words[6]));
  });
  return shown;
}

TEST(DdpLiveView, HasTheSpansOfTheTimelineWhileItIsWatched) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    const test::TemporaryDirectory directory;
    auto pair =
        make_pair({10}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v + self.w; });
    DistributedDataParallel model(pair, {.average = Average::samples});
    LiveMemory& memory = live_memory();
    EXPECT_EQ(memory.header.place, trace::pack(static_cast<std::uint32_t>(rank), 2));
    trace::RingReader<SpanRing> reader(memory.spans, trace::RingReader<SpanRing>::Start::next);
    const auto step = [&] {
      model.set_samples(3 + rank);
      model(input_of(rank, 0, {10})).square().sum().backward();
    };

    step();
    EXPECT_THAT(take_shown(reader).spans, IsEmpty());

    set_lease(memory, std::chrono::seconds(50));
    step();
    const Shown alone = take_shown(reader);
    EXPECT_THAT(alone.samples, ElementsAre(2 * (3 + rank)));
    EXPECT_GT(alone.threads, 0);
    EXPECT_THAT(alone.spans, SizeIs(::testing::Ge(4)));  // also the wait, if there was one

    trace::Timeline::start(directory.path(), rank, size);
    step();
    step();
    trace::Timeline::stop();
    const Shown both = take_shown(reader);
    EXPECT_THAT(both.samples, ElementsAre(3 * (3 + rank), 4 * (3 + rank)));
    const auto file = directory.path() / ("rank" + std::to_string(rank) + ".json");
    EXPECT_THAT(both.spans, ElementsAreArray(spans_in_file(file)));

    set_lease(memory, std::chrono::seconds(-1));
    step();
    const Shown after = take_shown(reader);
    EXPECT_THAT(after.spans, IsEmpty());
    EXPECT_EQ(after.threads, 0);
  });
}

// Two groups train a copy of one model each, with the same number; all ranks train the other one.
TEST(DdpLiveView, AndTimelinesNameTheGroupOfEachModel) {
  expect_torch_ranks(4, "paceline", [](int rank, int size) {
    const test::TemporaryDirectory directory;
    trace::Timeline::start(directory.path(), rank, size);
    const int first = rank / 2 * 2;
    std::vector<ProcessGroup> groups{new_group({0, 1}), new_group({2, 3})};
    const auto make = [] {
      return make_pair({10}, {10}, [](PairImpl& self, const Tensor& x) { return x * self.v; });
    };
    const ProcessGroup& own = groups[static_cast<std::size_t>(rank / 2)];
    DistributedDataParallel half(make(), {.process_group = own});
    LiveMemory& memory = live_memory();
    EXPECT_EQ(memory.header.identity, 0U);
    DistributedDataParallel whole(make());
    const std::uint64_t identity = memory.header.identity;
    EXPECT_NE(identity, 0U);
    const at::Tensor identities = at::empty({size}, at::kLong);
    all_gather_into_tensor(identities,
                           at::full({1}, static_cast<std::int64_t>(identity), at::kLong));
    EXPECT_EQ(identities.min().item<std::int64_t>(), identities.max().item<std::int64_t>());
    trace::Timeline::stop();

    std::ifstream file(directory.path() / ("rank" + std::to_string(rank) + ".json"));
    std::vector<std::pair<int, std::string>> described;
    for (const auto& event : nlohmann::json::parse(file)) {
      if (event["name"] != "paceline_group") continue;
      described.emplace_back(event["args"]["model"], event["args"]["ranks"]);
    }
    const std::string pair = std::to_string(first) + '-' + std::to_string(first + 1);
    const int number = described.at(0).first;
    EXPECT_THAT(described, ElementsAre(Pair(number, pair), Pair(number + 1, "0-3")));
  });
}

}  // namespace
}  // namespace paceline
