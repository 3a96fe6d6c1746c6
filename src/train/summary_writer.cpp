#include <paceline/summary_writer.h>

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <nlohmann/json.hpp>
#include <utility>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include "base/deadline.h"
#include "base/utf8.h"
#include "train/appended_file.h"
#include "train/event_record.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;

double seconds_since_1970() {
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  return time.count();
}

// Two of a process in one second differ in the last number.
std::string event_file_name() {
  static std::atomic<int> files;
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("events.out.tfevents.{}.{}.{}.{}",
                     static_cast<std::int64_t>(seconds_since_1970()), host.data(), ::getpid(),
                     files++);
}

void check_tag(const std::string& tag) {
  if (tag.empty()) throw UsageError("SummaryWriter: a tag is empty");
  if (tag == "step" || tag == "time") {
    throw UsageError(
        fmt::format("SummaryWriter: '{}' is no tag: each line of metrics.jsonl has "
                    "a step and a time; choose another name",
                    tag));
  }
  if (!base::is_utf8(tag)) throw UsageError("SummaryWriter: a tag is no UTF-8");
}

}  // namespace

class SummaryWriter::Impl {
 public:
  Impl(const fs::path& directory, const SummaryWriterOptions& options)
      : interval_(options.flush_interval), flush_(base::Deadline::after(interval_)) {
    std::error_code error;
    fs::create_directories(directory, error);
    if (error) {
      throw Error(
          fmt::format("cannot make the directory {}: {}", directory.string(), error.message()));
    }
    if (options.json_lines) lines_.emplace(directory / "metrics.jsonl");
    if (!options.tensorboard) return;
    events_.emplace(directory / event_file_name());
    events_->add(train::version_record(seconds_since_1970()));
    if (options.purge_step) {
      events_->add(train::purge_record(seconds_since_1970(), *options.purge_step));
    }
    flush();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    try {
      flush();
    } catch (const Error&) {
      // See the class.
    }
  }

  void add(const std::map<std::string, double>& values, std::int64_t step) {
    const double time = seconds_since_1970();
    if (lines_) lines_->add(line_of(values, step, time));
    if (events_) events_->add(train::scalars_record(time, step, values));
    if (flush_.expired()) flush();
  }

  void flush() {
    flush_ = base::Deadline::after(interval_);
    if (lines_) lines_->flush();
    if (events_) events_->flush();
  }

 private:
  static std::string line_of(const std::map<std::string, double>& values, std::int64_t step,
                             double time) {
    nlohmann::ordered_json line{{"step", step}, {"time", time}};
    for (const auto& [tag, value] : values) line[tag] = value;  // null unless it is finite
    return line.dump() + '\n';
  }

  std::chrono::milliseconds interval_;
  base::Deadline flush_;  // when what waits must be written
  std::optional<train::AppendedFile> lines_;
  std::optional<train::AppendedFile> events_;
};

SummaryWriter::SummaryWriter(const fs::path& directory, const SummaryWriterOptions& options) {
  if (options.all_ranks || get_rank() == 0) {
    impl_ = std::make_unique<Impl>(directory, options);
  }
}
SummaryWriter::SummaryWriter(SummaryWriter&&) noexcept = default;
SummaryWriter& SummaryWriter::operator=(SummaryWriter&&) noexcept = default;
SummaryWriter::~SummaryWriter() = default;

void SummaryWriter::add_scalar(const std::string& tag, double value, std::int64_t step) {
  add_scalars({{tag, value}}, step);
}

void SummaryWriter::add_scalars(const std::map<std::string, double>& values, std::int64_t step) {
  for (const auto& [tag, value] : values) check_tag(tag);
  if (impl_) impl_->add(values, step);
}

void SummaryWriter::flush() {
  if (impl_) impl_->flush();
}

}  // namespace paceline
