#include <gmock/gmock.h>
#include <stdlib.h>

#include <paceline/error.h>
#include <paceline/progress.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

namespace paceline {
namespace {

using namespace std::chrono_literals;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

// A file in memory.
class Output {
 public:
  Output() : file_(::open_memstream(&text_, &size_)) {}
  ~Output() {
    std::fclose(file_);
    std::free(text_);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  std::FILE* file() const { return file_; }
  // The output since the last call.
  std::string take() {
    std::fflush(file_);
    const std::string all(text_, size_);
    std::string fresh = all.substr(taken_);
    taken_ = all.size();
    return fresh;
  }

 private:
  char* text_ = nullptr;
  std::size_t size_ = 0;
  std::size_t taken_ = 0;
  std::FILE* file_;
};

class ProgressTest : public ::testing::Test {
 protected:
  ProgressOptions options(int columns) {
    return {.epochs = 3,
            .steps = 100,
            .output = output.file(),
            .rank = 0,
            .world_size = 2,
            .columns = columns,
            .clock = [this] { return std::chrono::steady_clock::time_point(now); }};
  }
  void step_after(Progress& progress, std::chrono::milliseconds time, double loss = 1) {
    now += time;
    progress.step(64, loss);
  }

  Output output;
  std::chrono::milliseconds now = 1h;
};

TEST_F(ProgressTest, WritesALineEveryFiveSecondsWithoutATerminal) {
  Progress progress(options(0));
  step_after(progress, 2s, 0.5);
  step_after(progress, 2999ms, 0.25);
  EXPECT_EQ(output.take(), "");
  step_after(progress, 1ms, 0.75);
  // 3 steps in 5 s; 2 ranks x 3 x 64 samples; 297 steps to go.
  EXPECT_EQ(output.take(), "epoch 1/3  step 3/100  77 samples/s  loss 0.5000  8:15 left\n");
  step_after(progress, 4s);
  EXPECT_EQ(output.take(), "");
}

TEST_F(ProgressTest, AlwaysWritesTheLastStepOfAnEpoch) {
  Progress progress(options(0));
  for (int i = 0; i < 100; ++i) step_after(progress, 1ms, 2);
  EXPECT_EQ(output.take(), "epoch 1/3  step 100/100  128,000 samples/s  loss 2.0000  0:00 left\n");
  now += 1h;  // an evaluation, whose time does not count
  progress.start_epoch(2);
  for (int i = 0; i < 100; ++i) step_after(progress, 20ms);
  EXPECT_EQ(output.take(), "epoch 3/3  step 100/100  6,400 samples/s  loss 1.0000  0:00 left\n");
}

TEST_F(ProgressTest, CountsOnWhereAnEpochIsResumed) {
  Progress progress(options(0));
  progress.start_epoch(2, 90);
  for (int i = 90; i < 100; ++i) step_after(progress, 1s, 2);
  EXPECT_EQ(output.take(),
            "epoch 3/3  step 95/100  128 samples/s  loss 2.0000  0:05 left\n"
            "epoch 3/3  step 100/100  128 samples/s  loss 2.0000  0:00 left\n");
  EXPECT_THROW(progress.start_epoch(0, -1), UsageError);
}

TEST_F(ProgressTest, RedrawsABarOnATerminal) {
  Progress progress(options(90));
  step_after(progress, 99ms);
  EXPECT_EQ(output.take(), "");
  step_after(progress, 1ms);
  // 89 columns: the text takes 11 and 45, the bar's frame 4.
  EXPECT_EQ(output.take(), "\repoch 1/3  [" + std::string(29, '-') +
                               "]  2/100  2,560 samples/s  loss 1.000  0:15 left\x1b[K");
  for (int i = 2; i < 50; ++i) step_after(progress, 1ms);
  output.take();
  step_after(progress, 100ms);
  EXPECT_EQ(output.take(), "\repoch 1/3  [" + std::string(13, '#') + std::string(14, '-') +
                               "]  51/100  26,323 samples/s  loss 1.000  0:01 left\x1b[K");
  for (int i = 51; i < 100; ++i) step_after(progress, 1ms);
  EXPECT_THAT(output.take(), MatchesRegex("\repoch 1/3  \\[#+\\]  100/100 .*left\x1b\\[K\n"));
}

TEST_F(ProgressTest, FitsIntoAnyTerminal) {
  for (int columns = 1; columns < 200; ++columns) {
    {
      Progress progress(options(columns));
      step_after(progress, 1s);
    }
    const std::string line = output.take();
    ASSERT_THAT(line, StartsWith("\r"));
    ASSERT_THAT(line, EndsWith("\x1b[K\n"));
    EXPECT_LE(line.find('\x1b') - 1, static_cast<std::size_t>(columns - 1));
  }
}

TEST_F(ProgressTest, EndsTheLineOfAnUnfinishedBar) {
  {
    Progress progress(options(80));
    step_after(progress, 1s);
    output.take();
  }
  EXPECT_EQ(output.take(), "\n");
  {
    Progress progress(options(80));
    for (int i = 0; i < 100; ++i) step_after(progress, 1ms);
    output.take();
  }
  EXPECT_EQ(output.take(), "");
}

TEST_F(ProgressTest, ReportsAtTheGivenInterval) {
  auto asked = options(0);
  asked.interval = 0ms;
  Progress progress(asked);
  step_after(progress, 0ms);  // zero elapsed time must not divide by zero
  EXPECT_THAT(output.take(), HasSubstr("step 1/100"));
  step_after(progress, 2h);
  EXPECT_THAT(output.take(), HasSubstr("298:00:00 left"));
}

TEST_F(ProgressTest, MoreStepsThanExpectedFillTheBarAndShowNoTimeLeft) {
  auto short_training = options(90);
  short_training.epochs = 1;
  short_training.steps = 2;
  Progress progress(short_training);
  for (int i = 0; i < 3; ++i) step_after(progress, 1s);
  output.take();
  for (int i = 0; i < 97; ++i) step_after(progress, 1s);
  const std::string text = output.take();
  // 89 columns: the text takes 11 and 43, the bar's frame 4.
  EXPECT_EQ(text.substr(text.rfind('\r')),
            "\repoch 1/1  [" + std::string(31, '#') +
                "]  100/2  128 samples/s  loss 1.000  0:00 left\x1b[K");
}

TEST_F(ProgressTest, OtherRanksAreSilent) {
  auto other = options(80);
  other.rank = 1;
  Progress progress(other);
  progress.start_epoch(0);
  for (int i = 0; i < 100; ++i) step_after(progress, 1s);
  EXPECT_EQ(output.take(), "");
}

TEST_F(ProgressTest, WorksWithoutAnOutput) {
  auto silent = options(80);
  silent.output = nullptr;
  Progress progress(silent);
  for (int i = 0; i < 100; ++i) step_after(progress, 1s);
}

TEST_F(ProgressTest, WritesLinesToAFile) {
  auto file = options(0);
  file.columns.reset();
  Progress progress(file);
  step_after(progress, 5s);
  EXPECT_THAT(output.take(), StartsWith("epoch 1/3  step 1/100"));
}

TEST_F(ProgressTest, RejectsZeroSteps) {
  auto none = options(0);
  none.steps = 0;
  EXPECT_THAT([&] { Progress{none}; }, ThrowsMessage<UsageError>(HasSubstr("3 epochs of 0 steps")));
  none = options(0);
  none.epochs = 0;
  EXPECT_THAT([&] { Progress{none}; }, ThrowsMessage<UsageError>(HasSubstr("0 epochs")));
}

}  // namespace
}  // namespace paceline
