#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace paceline::report {

// The members of an event that are read. From `model` on, they are members of its args.
enum class Field {
  name,
  cat,
  ph,
  ts,
  dur,  //
  model,
  step,
  bucket,
  peer,
  bytes,
  parameters,
  version,
  rank,
  size,
  local_size,
  cores,
  affinity,
  started,
  boot,
  spans,
  wall,
  used,
  running,
  queued,
  at,
  cpu,
  preempted,
  faults,
  periods,
  throttled,
  busy,
  stolen,
  machine,
  cpu_pressure,
  memory_pressure,
  latency,
  rate,
  ranks,
};
inline constexpr std::size_t kFields = 38;
inline constexpr std::int64_t kMaxCount = std::int64_t{1} << 53;  // doubles are exact up to here

// An event of the Trace Event Format.
class Event {
 public:
  // Empty unless it is a string.
  std::string_view text(Field field) const { return at(field).text; }
  std::optional<double> number(Field field) const { return at(field).number; }
  // Empty unless it is a whole number in these bounds.
  std::optional<std::int64_t> integer(Field field, std::int64_t low, std::int64_t high) const;

 private:
  friend class EventHandler;
  struct Value {
    std::string text;
    std::optional<double> number;
  };
  const Value& at(Field field) const { return values_[static_cast<std::size_t>(field)]; }

  std::array<Value, kFields> values_;
};

// Calls `take` for each object of the JSON array `text`. Returns true if the array's end is
// missing; an incomplete last event is left out then. Throws CorruptFile, naming `path` and the
// byte, if `text` is malformed otherwise.
bool parse_events(std::string_view text, const std::string& path,
                  const std::function<void(const Event&)>& take);

}  // namespace paceline::report
