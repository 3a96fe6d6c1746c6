#include <paceline/progress.h>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/environment.h"
#include "trace/live_view.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;

int terminal_columns(std::FILE* output) {
  const int fd = ::fileno(output);
  const auto& terminal = base::environment().terminal;
  struct stat info {};
  if (terminal && ::fstat(fd, &info) == 0 &&
      std::ranges::find(terminal->pipes, static_cast<std::int64_t>(info.st_ino)) !=
          terminal->pipes.end()) {
    return terminal->columns;
  }
  winsize size{};
  if (!::isatty(fd)) return 0;
  constexpr int kUsual = 80;
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsual;
}

// 1234567 as "1,234,567", in any locale.
std::string with_thousands(std::int64_t value) {
  if (value < 1000) return fmt::to_string(value);
  return fmt::format("{},{:03}", with_thousands(value / 1000), value % 1000);
}

// "0:07", "12:30", "2:05:00".
std::string format_duration(double seconds) {
  const auto whole = std::llround(seconds);
  const auto minutes = whole / 60;
  if (minutes < 60) return fmt::format("{}:{:02}", minutes, whole % 60);
  return fmt::format("{}:{:02}:{:02}", minutes / 60, minutes % 60, whole % 60);
}

// "[####----]  " in at most `room` columns; empty if a bar would be too short to be useful.
std::string draw_bar(std::int64_t done, std::int64_t all, std::int64_t room) {
  constexpr std::int64_t kFrame = 4;
  constexpr std::int64_t kMostCells = 40;
  const std::int64_t cells = std::min(room - kFrame, kMostCells);
  if (cells < 5) return "";
  return fmt::format("[{:-<{}}]  ", std::string(static_cast<std::size_t>(cells * done / all), '#'),
                     cells);
}

}  // namespace

Progress::Progress(ProgressOptions options)
    : options_(std::move(options)),
      world_size_(options_.world_size ? *options_.world_size : get_world_size()) {
  if (options_.epochs < 1 || options_.steps < 1) {
    throw UsageError(fmt::format("Progress: {} epochs of {} steps; both must be at least 1",
                                 options_.epochs, options_.steps));
  }
  if ((options_.rank ? *options_.rank : get_rank()) != 0) options_.output = nullptr;
  if (options_.output == nullptr) return;
  columns_ = options_.columns ? *options_.columns : terminal_columns(options_.output);
  interval_ = options_.interval.value_or(columns_ > 0 ? 100ms : 5s);
  start_epoch(0);
}

Progress::~Progress() {
  if (line_open_) write("\n");
}

void Progress::start_epoch(int epoch, std::int64_t step) {
  if (step < 0) {
    throw UsageError(
        fmt::format("Progress::start_epoch: step is {}; it must not be negative", step));
  }
  if (options_.output == nullptr) return;
  state_ = {.epoch = epoch, .first = step, .step = step};
  epoch_start_ = last_report_ = options_.clock();
}

void Progress::step(std::int64_t samples, double loss) {
  if (auto* const view = trace::LiveView::current()) {
    view->count_samples(static_cast<double>(samples));
  }
  if (options_.output == nullptr) return;
  ++state_.step;
  state_.samples += samples;
  state_.loss_sum += loss;
  const auto now = options_.clock();
  const bool last = state_.step == options_.steps;
  if (last || now - last_report_ >= interval_) report(now, last);
}

void Progress::report(Clock::time_point now, bool last) {
  last_report_ = now;
  const double elapsed = std::max(std::chrono::duration<double>(now - epoch_start_).count(), 1e-9);
  const auto done = static_cast<double>(state_.step - state_.first);
  // Not negative if a training runs more steps than its options say.
  const auto left = static_cast<double>(
      std::max<std::int64_t>(options_.steps * (options_.epochs - state_.epoch) - state_.step, 0));
  std::string epoch = fmt::format("epoch {}/{}  ", state_.epoch + 1, options_.epochs);
  const std::string step = fmt::format("{}/{}  ", state_.step, options_.steps);
  const std::string rate = fmt::format(
      "{} samples/s  ",
      with_thousands(std::llround(static_cast<double>(state_.samples) * world_size_ / elapsed)));
  const double loss = state_.loss_sum / done;
  const std::string time = format_duration(elapsed / done * left) + " left";
  if (columns_ == 0) {
    write(fmt::format("{}step {}{}loss {:.4f}  {}\n", epoch, step, rate, loss, time));
    return;
  }
  // The last column stays empty: some terminals wrap as soon as it is written.
  const int room = columns_ - 1;
  std::string tail;
  for (const std::string& field : {step, rate, fmt::format("loss {:.3f}  ", loss), time}) {
    if (std::ssize(epoch) + std::ssize(tail) + std::ssize(field) > room) break;
    tail += field;
  }
  if (std::ssize(epoch) > room) epoch.clear();
  const auto left_over = room - std::ssize(epoch) - std::ssize(tail);
  line_open_ = !last;
  write(fmt::format("\r{}{}{}\x1b[K{}", epoch,
                    draw_bar(std::min(state_.step, options_.steps), options_.steps, left_over),
                    tail, last ? "\n" : ""));
}

void Progress::write(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), options_.output);
  std::fflush(options_.output);
}

}  // namespace paceline
