#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <paceline/error.h>
#include <paceline/log.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/environment.h"
#include "base/unique_fd.h"
#include "support/thoroughness.h"
#include "top/find_job.h"
#include "top/live_reader.h"
#include "trace/live_view.h"

namespace paceline::trace {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;
using top::LiveReader;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

Span live_span(std::uint64_t step, Kind kind = Kind::step) {
  const Clock::time_point begin(std::chrono::nanoseconds(1000 * step + 7));
  return {.kind = kind, .model = 3, .step = step, .begin = begin, .end = begin + 1001ns};
}

// Memory as a process would make it, to write into.
class MadeMemory {
 public:
  explicit MadeMemory(std::size_t bytes = sizeof(LiveMemory), int seals = F_SEAL_SHRINK)
      : fd_(::memfd_create("made", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    EXPECT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::fcntl(fd_.get(), F_ADD_SEALS, seals), 0);
    if (bytes < sizeof(LiveMemory)) return;
    memory_ = static_cast<LiveMemory*>(
        ::mmap(nullptr, sizeof(LiveMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
    memory_->header.magic = kLiveMagic;
    memory_->header.version = kLiveVersion;
  }
  MadeMemory(const MadeMemory&) = delete;
  MadeMemory& operator=(const MadeMemory&) = delete;
  ~MadeMemory() {
    if (memory_ != nullptr) ::munmap(memory_, sizeof(LiveMemory));
  }

  int fd() const { return fd_.get(); }
  LiveMemory* operator->() { return memory_; }

 private:
  base::UniqueFd fd_;
  LiveMemory* memory_ = nullptr;
};

// A process that has called `start` and lives until this object is destroyed.
class WaitingChild {
 public:
  explicit WaitingChild(const std::function<void()>& start) {
    std::array<int, 2> ready{};
    if (::pipe(ready.data()) != 0) throw std::runtime_error("no pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      start();
      ::close(ready[1]);
      for (;;) ::pause();
    }
    ::close(ready[1]);
    char nothing = 0;
    EXPECT_EQ(::read(ready[0], &nothing, 1), 0);
    ::close(ready[0]);
  }
  WaitingChild(const WaitingChild&) = delete;
  WaitingChild& operator=(const WaitingChild&) = delete;
  ~WaitingChild() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

// This process, and how the command sees it.
class LiveViewTest : public ::testing::Test {
 protected:
  // Tests that run at the same time are jobs of their own.
  static void SetUpTestSuite() {
    ::setenv("TORCHELASTIC_RUN_ID", std::to_string(::getpid()).c_str(), 1);
  }
  void SetUp() override {
    LiveView::start(2, 4, {.number = 0, .ranks = 3});
    ASSERT_NE(LiveView::current(), nullptr);
  }
  static std::shared_ptr<LiveReader> reader() {
    const auto job = top::find_job({.process = ::getpid(), .job = {}});
    if (!job) throw std::runtime_error("this process is not found");
    return top::ranks_of(*job).at(0).reader;
  }
  static LiveView& view() { return *LiveView::current(); }
};

TEST_F(LiveViewTest, IsFoundThroughProc) {
  const auto job = top::find_job({.process = ::getpid(), .job = {}});
  ASSERT_TRUE(job);
  EXPECT_EQ(job->size, 4);
  const auto ranks = top::ranks_of(*job);
  ASSERT_THAT(ranks, SizeIs(1));
  EXPECT_EQ(ranks[0].pid, ::getpid());
  EXPECT_EQ(ranks[0].place.rank, 2);
  EXPECT_EQ(ranks[0].place.node.ranks, 3);
  EXPECT_FALSE(ranks[0].has_ended());
  // A thread stands for its process.
  pid_t thread = 0;
  std::thread([&] {
    thread = ::gettid();
    EXPECT_EQ(top::find_job({.process = thread, .job = {}}), job);
  }).join();
}

TEST_F(LiveViewTest, ShowsTheLastWorld) {
  const auto before = reader();
  LiveView::start(0, 1, {});
  EXPECT_EQ(before->place()->size, 1);
  EXPECT_EQ(reader()->place()->rank, 0);
}

TEST_F(LiveViewTest, RecordsReachWhoWatches) {
  view().describe_bucket(3, 6, 1234, "fc.weight, fc.bias");
  view().record(live_span(4), kNone);  // nobody reads it
  const auto reader = LiveViewTest::reader();
  Span wait = live_span(5, Kind::wait);
  wait.bucket = 6;
  wait.peer = 1;
  view().record(live_span(5), 640);
  view().record(wait, kNone);
  view().sample_thread(ThreadSampler::Moment::begin);
  const auto records = reader->read();
  ASSERT_THAT(records.spans, SizeIs(2));
  EXPECT_EQ(records.spans[0].span.step, 5U);
  EXPECT_EQ(records.spans[0].span.bucket, -1);
  EXPECT_EQ(records.spans[0].span.peer, -1);
  EXPECT_EQ(records.spans[0].samples, 640);
  const Span& read = records.spans[1].span;
  EXPECT_EQ(read.kind, Kind::wait);
  EXPECT_EQ(read.model, 3U);
  EXPECT_EQ(read.bucket, 6);
  EXPECT_EQ(read.peer, 1);
  EXPECT_EQ(read.begin.time_since_epoch(), 5007ns);
  EXPECT_EQ(read.end.time_since_epoch(), 6008ns);
  EXPECT_TRUE(std::isnan(records.spans[1].samples));
  ASSERT_THAT(records.thread, SizeIs(1));
  EXPECT_GT(records.thread[0].cpu, 0);
  const auto& bucket = records.buckets.at({3, 6});
  EXPECT_EQ(bucket.bytes, 1234U);
  EXPECT_EQ(bucket.parameters, "fc.weight, fc.bias");
  EXPECT_EQ(records.invalid, 0U);
  EXPECT_THAT(reader->read().spans, IsEmpty());
  EXPECT_EQ(reader->lost(), 0U);
}

TEST_F(LiveViewTest, SamplesOfTheProgramCountFirst) {
  const auto reader = LiveViewTest::reader();
  view().count_samples(8);
  view().count_samples(24);
  view().record(live_span(1), 5);
  EXPECT_EQ(reader->read().spans.at(0).samples, 32);
}

TEST_F(LiveViewTest, LongTextIsCut) {
  const std::string names(1000, 'x');
  view().describe_bucket(9, 0, 1, names);
  const std::string shown = reader()->read().buckets.at({9, 0}).parameters;
  EXPECT_EQ(shown, names.substr(0, 224));
}

TEST_F(LiveViewTest, DescribesTheGroupOfAModel) {
  view().describe_group(5, std::vector<int>{1, 2, 7});
  std::vector<int> apart;
  for (int rank = 0; rank < 200; rank += 2) apart.push_back(rank);
  view().describe_group(6, apart);  // too long for a record
  const auto groups = LiveViewTest::reader()->read().groups;
  EXPECT_THAT(groups.at(5), ElementsAre(1, 2, 7));
  EXPECT_FALSE(groups.contains(6));
}

// Two jobs without a launcher, which are alike but for what their ranks know of each other.
TEST_F(LiveViewTest, AnotherWorldIsAnotherJob) {
  std::vector<std::unique_ptr<WaitingChild>> ranks;
  for (const std::uint64_t identity : {5, 6}) {
    for (int rank = 0; rank < 2; ++rank) {
      ranks.push_back(std::make_unique<WaitingChild>([=] {
        ::unsetenv("TORCHELASTIC_RUN_ID");
        base::refresh_environment();
        LiveView::start(rank, 2, {}, identity);
        LiveView::start(rank, 2, {});  // of a model of fewer ranks
      }));
    }
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto job = top::find_job({.process = ranks[i]->pid(), .job = {}});
    ASSERT_TRUE(job);
    std::vector<pid_t> found;
    for (const auto& one : top::ranks_of(*job)) found.push_back(one.pid);
    const std::size_t first = i / 2 * 2;
    EXPECT_THAT(found, ElementsAre(ranks[first]->pid(), ranks[first + 1]->pid()));
  }
}

TEST_F(LiveViewTest, LostRecordsAreCounted) {
  const auto reader = LiveViewTest::reader();
  for (std::uint64_t i = 0; i < SpanRing::kCapacity + 100; ++i) view().record(live_span(i), kNone);
  const auto records = reader->read();
  ASSERT_THAT(records.spans, SizeIs(SpanRing::kCapacity));
  EXPECT_EQ(records.spans.front().span.step, 100U);
  EXPECT_EQ(reader->lost(), 100U);
}

// A viewer that starts after the buckets were planned, of a model with 4000.
TEST_F(LiveViewTest, KeepsTheBucketsOfALargeModel) {
  for (int bucket = 0; bucket < 4000; ++bucket) view().describe_bucket(5, bucket, 1234, "weight");
  const auto reader = LiveViewTest::reader();
  const auto buckets = reader->read().buckets;
  for (int bucket = 0; bucket < 4000; ++bucket) EXPECT_TRUE(buckets.contains({5, bucket}));
  EXPECT_EQ(reader->lost_buckets(), 0U);
  for (int bucket = 0; bucket < 4000; ++bucket) view().describe_bucket(6, bucket, 1234, "weight");
  EXPECT_GT(LiveViewTest::reader()->read().buckets.size(), 4000U);
}

TEST_F(LiveViewTest, AForkedChildHasItsOwn) {
  const auto reader = LiveViewTest::reader();
  LiveView* const inherited = LiveView::current();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    bool good = LiveView::current() == nullptr && LiveView::watched() == nullptr;
    inherited->record(live_span(1), kNone);
    inherited->describe_bucket(77, 0, 1, "");
    // Its parent's memory is open there too, and is not its own.
    bool is_bystander = false;
    try {
      top::find_job({.process = ::getpid(), .job = {}});
    } catch (const UsageError&) {
      is_bystander = true;
    }
    good = good && is_bystander;
    LiveView::start(1, 2, {});
    good = good && top::find_job({.process = ::getpid(), .job = {}})->size == 2;
    LiveView::current()->record(live_span(1), kNone);
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const auto records = reader->read();
  EXPECT_THAT(records.spans, IsEmpty());
  EXPECT_FALSE(records.buckets.contains({77, 0}));
}

// In a child, since a process makes its memory once.
TEST(LiveViewLimits, AProcessThatMayNotMakeFilesTrainsWithoutIt) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::string logged;
    set_log_callback([&](LogLevel, std::string_view text) { logged += text; });
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    LiveView::start(0, 1, {});
    LiveView::start(0, 1, {});
    const bool good = LiveView::current() == nullptr && LiveView::watched() == nullptr &&
                      logged ==
                          "`paceline top` cannot watch this process: cannot make a file in "
                          "memory: File too large (EFBIG)";
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// A lease is a word that any viewer may write.
TEST_F(LiveViewTest, RecordsOnlyWhileLeased) {
  const auto first = reader();
  const auto second = reader();
  EXPECT_EQ(LiveView::watched(), nullptr);
  const auto begin = Clock::now();
  first->watch_until(begin - 1ns);
  EXPECT_EQ(LiveView::watched(), nullptr);
  second->watch_until(begin + 30s);
  EXPECT_EQ(LiveView::watched(), LiveView::current());
  first->watch_until(begin + 1ns);  // does not shorten it
  EXPECT_EQ(LiveView::watched(), LiveView::current());
}

class Lease : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(, Lease,
                         ::testing::Values(std::numeric_limits<std::int64_t>::min(), -1, 1,
                                           std::numeric_limits<std::int64_t>::max()),
                         [](const auto& one) { return "Word" + std::to_string(one.index); });

TEST_P(Lease, OfHostileValueIsNone) {
  MadeMemory memory;
  memory->watched_until = GetParam();
  LiveReader reader(memory.fd());
  EXPECT_FALSE(is_leased(memory->watched_until, Clock::now()));
  reader.watch_until(Clock::now() + 30s);
  EXPECT_TRUE(is_leased(memory->watched_until, Clock::now()));
}

using SmallRing = SharedRing<4, 8>;

// Threads stand for processes. Each record has its number in all of its words. They are so long,
// and the ring so short, that the reader mostly reads what is being overwritten.
TEST(SharedRingTest, RecordsAreWholeWhileTheyAreOverwritten) {
  using LongRing = SharedRing<500, 2>;
  const auto ring = std::make_unique<LongRing>();
  const std::uint64_t count = 100'000 * static_cast<std::uint64_t>(test::thoroughness());
  RingReader<LongRing> reader(*ring, RingReader<LongRing>::Start::next);
  std::thread writer([&] {
    RingWriter<LongRing> out(*ring);
    LongRing::Values words;
    for (std::uint64_t i = 1; i <= count; ++i) {
      words.fill(i);
      out.write(words);
    }
  });
  std::uint64_t last = 0;
  std::uint64_t whole = 0;
  std::uint64_t torn = 0;
  const auto take = [&](const LongRing::Values& words) {
    torn += std::ranges::count(words, words[0]) == std::ssize(words) ? 0 : 1;
    EXPECT_GT(words[0], last);
    last = words[0];
    ++whole;
  };
  while (whole + reader.lost() < count) reader.read(take);
  writer.join();
  EXPECT_EQ(torn, 0U);
  EXPECT_EQ(whole + reader.lost(), count);
}

TEST(SharedRingTest, RecordThatIsBeingWrittenIsDropped) {
  const auto ring = std::make_unique<SmallRing>();
  RingWriter<SmallRing> writer(*ring);
  for (std::uint64_t i = 1; i <= 3; ++i) writer.write({i, i, i, i});
  ring->records[0].number = 0;
  ring->records[1].number = 2 + SmallRing::kCapacity;
  RingReader<SmallRing> reader(*ring, RingReader<SmallRing>::Start::oldest);
  std::vector<std::uint64_t> read;
  reader.read([&](const SmallRing::Values& words) { read.push_back(words[0]); });
  EXPECT_THAT(read, ::testing::ElementsAre(3));
  EXPECT_EQ(reader.lost(), 2U);
}

TEST(SharedRingTest, HostileCountsEndTheReading) {
  const auto ring = std::make_unique<SmallRing>();
  RingWriter<SmallRing> writer(*ring);
  RingReader<SmallRing> reader(*ring, RingReader<SmallRing>::Start::oldest);
  int read = 0;
  const auto take = [&](const SmallRing::Values&) { ++read; };
  for (const std::uint64_t count :
       {std::numeric_limits<std::uint64_t>::max(), std::uint64_t{0}, std::uint64_t{1} << 63,
        std::uint64_t{5}, std::numeric_limits<std::uint64_t>::max()}) {
    ring->count = count;
    reader.read(take);
  }
  EXPECT_EQ(read, 0);
  writer.write({1, 1, 1, 1});  // a process that goes on normally is read again
  reader.read(take);
  writer.write({2, 2, 2, 2});
  reader.read(take);
  EXPECT_EQ(read, 1);
}

TEST(LiveReaderTest, RejectsMemoryThatIsNotALiveView) {
  const auto expect = [](const MadeMemory& memory, const char* text) {
    EXPECT_THAT([&] { LiveReader reader(memory.fd()); }, ThrowsMessage<Error>(HasSubstr(text)));
  };
  // Either could be cut while it is read, which would be SIGBUS.
  expect(MadeMemory(sizeof(LiveMemory), 0), "that of another version of Paceline");
  expect(MadeMemory(sizeof(LiveMemory) - 1), "that of another version of Paceline");
  MadeMemory newer;
  newer->header.version = kLiveVersion + 1;
  expect(newer, "has version 4, expected 3: use the paceline that it was built with");
  MadeMemory other;
  other->header.magic = 1;
  expect(other, "has version");
}

TEST(LiveReaderTest, PlacesThatMakeNoSenseAreNone) {
  MadeMemory memory;
  const LiveReader reader(memory.fd());
  EXPECT_FALSE(reader.place());
  for (const std::uint64_t place :
       {pack(0, 0), pack(1, 1), pack(0xffffffff, 2), pack(0, 0xffffffff)}) {
    memory->header.place = place;
    EXPECT_FALSE(reader.place()) << place;
  }
  memory->header.place = pack(1, 2);
  EXPECT_TRUE(reader.place());
  memory->header.node = pack(0, 3);
  EXPECT_FALSE(reader.place());
  for (Word& word : memory->header.job) word = 0x6161616161616161;
  EXPECT_EQ(reader.job(), std::string(128, 'a'));
}

TEST(LiveReaderTest, InvalidRecordsAreCounted) {
  const auto now = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
  constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
  constexpr std::uint64_t bucket = static_cast<std::uint64_t>(Kind::bucket);
  MadeMemory memory;
  LiveReader reader(memory.fd());
  RingWriter<SpanRing> writer(memory->spans);
  for (const SpanRing::Values& words : {SpanRing::Values{6, 0, 0, 0, 1, 2, 0},
                                        {huge, 0, 0, 0, 1, 2, 0},
                                        {0, 0, huge, 0, 1, 2, 0},
                                        {0, 0, 0, huge, 1, 2, 0},
                                        {0, 0, 0, 0, 2, 1, 0},
                                        {0, 0, 0, 0, 1, huge, 0},
                                        {0, 0, 0, 0, 1, now + 60'000'000'000, 0},
                                        {bucket, 0, 0, 0, 1, 2, 0},
                                        {bucket, huge, 0, 0, 1, 2, 0},
                                        {kThreadRecord, huge, 1, 1, 1, 1, 0},
                                        {kThreadRecord, 1, huge, 1, 1, 1, 0},
                                        {kThreadRecord, 1, 1, huge - 1, 1, 1, 0}}) {
    writer.write(words);
    const auto records = reader.read();
    EXPECT_EQ(records.invalid, 1U);
    EXPECT_THAT(records.spans, IsEmpty());
    EXPECT_THAT(records.thread, IsEmpty());
  }
  RingWriter<BucketRing> buckets(memory->buckets);
  buckets.write({0, huge, 1});
  buckets.write({0, 0, huge});
  buckets.write({0, kGroupRecord, 0});
  buckets.write({0, kGroupRecord, 0, 'x'});
  const auto records = reader.read();
  EXPECT_EQ(records.invalid, 4U);
  EXPECT_TRUE(records.buckets.empty());
  EXPECT_TRUE(records.groups.empty());
}

}  // namespace
}  // namespace paceline::trace
