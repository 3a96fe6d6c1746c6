#include "trace/format.h"

#include <fmt/compile.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/cores.h"
#include "base/environment.h"
#include "base/number_list.h"

namespace paceline::trace {
namespace {

// By Kind.
constexpr std::array<std::string_view, 9> kNames{
    "step",   "pre_forward_sync", "forward",         "backward",     "wait",
    "bucket", "device_forward",   "device_backward", "device_bucket"};

// Buckets and a device overlap other spans of their rank, so each has a row of its own in a viewer,
// below its model's; a device's rows are the last ones.
std::uint64_t row_of(std::uint64_t model, int bucket = -1, bool on_device = false) {
  constexpr std::uint64_t kRows = 100000;
  return model * kRows + (on_device ? kRows / 2 : 0) + static_cast<std::uint64_t>(bucket + 1);
}

std::int64_t nanoseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

std::string json_text(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string metadata(std::string_view name, int rank, std::uint64_t row, std::string_view args) {
  return fmt::format(",\n{{\"name\":\"{}\",\"ph\":\"M\",\"pid\":{},\"tid\":{},\"args\":{{{}}}}}",
                     name, rank, row, args);
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::int64_t microseconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string_view name_of(Kind kind) {
  return kNames[static_cast<std::size_t>(kind)];
}

std::optional<Kind> kind_of(std::string_view name) {
  const auto found = std::ranges::find(kNames, name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<Kind>(found - kNames.begin());
}

void append_span(std::string& text, int rank, const Span& span) {
  // A string's iterator would take the characters one by one.
  std::array<char, 400> event;
  const std::string_view name = name_of(span.kind);
  const std::int64_t begin = std::max<std::int64_t>(0, nanoseconds(span.begin.time_since_epoch()));
  const std::int64_t length = std::max<std::int64_t>(0, nanoseconds(span.end - span.begin));
  char* at = fmt::format_to(
      event.data(),
      FMT_COMPILE(",\n{{\"name\":\"{}\",\"cat\":\"{}\",\"ph\":\"X\",\"pid\":{},\"tid\":{},"
                  "\"ts\":{}.{:03},\"dur\":{}.{:03},\"args\":{{\"model\":{},\"step\":{}"),
      name, name, rank,
      row_of(span.model, is_of_bucket(span.kind) ? span.bucket : -1, is_on_device(span.kind)),
      begin / 1000, begin % 1000, length / 1000, length % 1000, span.model, span.step);
  if (span.bucket >= 0) at = fmt::format_to(at, FMT_COMPILE(",\"bucket\":{}"), span.bucket);
  if (span.peer >= 0) at = fmt::format_to(at, FMT_COMPILE(",\"peer\":{}"), span.peer);
  text.append(event.data(), at);
  text += "}}";
}

std::string job_event(int rank, int size, const Node& node) {
  return metadata("process_name", rank, 0, fmt::format("\"name\":\"rank {}\"", rank)) +
         metadata("process_sort_index", rank, 0, fmt::format("\"sort_index\":{}", rank)) +
         metadata(
             "paceline_job", rank, 0,
             fmt::format("\"version\":{},\"rank\":{},\"size\":{},\"node\":{},\"local_size\":{},"
                         "\"cores\":{},\"affinity\":\"{}\",\"process\":{},\"started\":{},"
                         "\"boot\":{}",
                         kFormatVersion, rank, size, node.number, node.ranks,
                         base::available_cores(), base::list_text(base::affinity()), ::getpid(),
                         microseconds_since_1970(), json_text(boot_id())));
}

std::string bucket_event(int rank, std::uint64_t model, int bucket, std::uint64_t bytes,
                         std::string_view parameters) {
  const std::uint64_t row = row_of(model, bucket);
  const std::string title = fmt::format("model {} bucket {}: {}", model, bucket, parameters);
  return metadata("thread_name", rank, row, fmt::format("\"name\":{}", json_text(title))) +
         metadata("paceline_bucket", rank, row,
                  fmt::format("\"model\":{},\"bucket\":{},\"bytes\":{},\"parameters\":{}", model,
                              bucket, bytes, json_text(parameters)));
}

std::string group_event(int rank, std::uint64_t model, std::span<const int> ranks) {
  return metadata("paceline_group", rank, row_of(model),
                  fmt::format("\"model\":{},\"ranks\":\"{}\"", model, base::list_text(ranks)));
}

std::string reduction_event(int rank, std::uint64_t model, const ReductionCost& cost) {
  return metadata("paceline_reduction", rank, row_of(model),
                  fmt::format("\"model\":{},\"latency\":{:.3f},\"rate\":{:.3f}", model,
                              cost.latency, cost.rate));
}

std::string device_event(int rank, std::uint64_t model) {
  return metadata("thread_name", rank, row_of(model, -1, true),
                  fmt::format("\"name\":\"model {} on its device\"", model));
}

std::string model_event(int rank, std::uint64_t model) {
  return metadata("thread_name", rank, row_of(model), fmt::format("\"name\":\"model {}\"", model));
}

std::string cpu_event(int rank, const CpuUse& use) {
  std::string args = fmt::format(
      "\"at\":{}.{:03},\"wall\":{},\"used\":{},\"running\":{},\"queued\":{}",
      nanoseconds(use.at.time_since_epoch()) / 1000, nanoseconds(use.at.time_since_epoch()) % 1000,
      use.wall, use.used, use.running, use.queued);
  for (const auto& [name, value] : {std::pair("periods", use.periods),
                                    {"throttled", use.throttled},
                                    {"busy", use.busy},
                                    {"stolen", use.stolen},
                                    {"machine", use.machine},
                                    {"cpu_pressure", use.cpu_pressure},
                                    {"memory_pressure", use.memory_pressure}}) {
    if (value != kUnknown) args += fmt::format(",\"{}\":{}", name, value);
  }
  return metadata("paceline_cpu", rank, 0, args);
}

void append_thread_event(std::string& text, int rank, const ThreadUse& use) {
  std::array<char, 250> event;
  const std::int64_t at = std::max<std::int64_t>(0, nanoseconds(use.at.time_since_epoch()));
  char* end = fmt::format_to(
      event.data(),
      FMT_COMPILE(",\n{{\"name\":\"paceline_thread\",\"ph\":\"M\",\"pid\":{},\"tid\":0,\"args\":{{"
                  "\"at\":{}.{:03},\"cpu\":{},\"preempted\":{},\"faults\":{}"),
      rank, at / 1000, at % 1000, use.cpu, use.preempted, use.faults);
  if (use.queued != kUnknown) {
    end = fmt::format_to(end, FMT_COMPILE(",\"queued\":{}"), use.queued);
  }
  text.append(event.data(), end);
  text += "}}";
}

std::string dropped_event(int rank, std::uint64_t spans) {
  return metadata("paceline_lost", rank, 0, fmt::format("\"spans\":{}", spans));
}

std::string full_event(int rank) {
  return metadata("paceline_full", rank, 0, "");
}

}  // namespace paceline::trace
