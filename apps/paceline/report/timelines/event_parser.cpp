#include "report/timelines/event_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include <paceline/error.h>

#include "base/printable.h"

namespace paceline::report {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, kFields> kFieldNames{
    "name",       "cat",       "ph",      "ts",           "dur",
    "model",      "step",      "bucket",  "peer",         "bytes",
    "parameters", "version",   "rank",    "size",         "local_size",
    "cores",      "affinity",  "started", "boot",         "spans",
    "wall",       "used",      "running", "queued",       "at",
    "cpu",        "preempted", "faults",  "periods",      "throttled",
    "busy",       "stolen",    "machine", "cpu_pressure", "memory_pressure",
    "latency",    "rate",      "ranks"};
// "out_of_range.406": a number that no double can hold.
constexpr int kOverflow = 406;
constexpr std::size_t kMostOfToken = 40;

}  // namespace

// Builds no tree of values and does not recurse: a file may be large, and nested to any depth.
class EventHandler final : public nlohmann::json_sax<json> {
 public:
  explicit EventHandler(const std::function<void(const Event&)>& take) : take_(take) {}

  bool null() override { return scalar(); }
  bool boolean(bool) override { return scalar(); }
  bool number_integer(number_integer_t value) override {
    return number(static_cast<double>(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    return number(static_cast<double>(value));
  }
  bool number_float(number_float_t value, const string_t&) override { return number(value); }
  bool string(string_t& value) override {
    if (field_ != nullptr) field_->text = std::move(value);
    return scalar();
  }
  bool binary(binary_t&) override { return scalar(); }

  bool start_object(std::size_t) override {
    if (depth_ == 1) event_ = {};
    in_args_ |= depth_ == 2 && args_follow_;
    return begin_value();
  }
  bool end_object() override {
    end_value();
    if (depth_ == 1) take_(event_);
    return true;
  }
  bool start_array(std::size_t) override {
    is_array_ |= depth_ == 0;
    return begin_value();
  }
  bool end_array() override {
    end_value();
    return true;
  }
  bool key(string_t& name) override {
    args_follow_ = depth_ == 2 && name == "args";
    field_ = depth_ == 2 || (depth_ == 3 && in_args_) ? find(name) : nullptr;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& token,
                   const nlohmann::detail::exception& error) override {
    position_ = position;
    const std::string got =
        base::printable_line(token.substr(token.size() - std::min(token.size(), kMostOfToken)));
    reason_ = error.id == kOverflow
                  ? fmt::format("the number {} is too large; expected at most 2^53", got)
                  : fmt::format("invalid JSON, last read '{}'; expected an array of events", got);
    return false;
  }

  bool is_array() const { return is_array_; }
  bool is_whole() const { return is_array_ && depth_ == 0; }
  std::size_t position() const { return position_; }
  const std::string& reason() const { return reason_; }

 private:
  bool begin_value() {
    field_ = nullptr;
    ++depth_;
    return is_array_;
  }
  void end_value() {
    field_ = nullptr;
    --depth_;
    if (depth_ == 2) in_args_ = false;
  }
  bool scalar() {
    field_ = nullptr;
    return is_array_;
  }
  bool number(double value) {
    if (field_ != nullptr) field_->number = value;
    return scalar();
  }
  Event::Value* find(std::string_view name) {
    constexpr auto args = kFieldNames.begin() + static_cast<int>(Field::model);
    const auto begin = depth_ == 2 ? kFieldNames.begin() : args;
    const auto end = depth_ == 2 ? args : kFieldNames.end();
    const auto found = std::find(begin, end, name);
    if (found == end) return nullptr;
    return &event_.values_[static_cast<std::size_t>(found - kFieldNames.begin())];
  }

  const std::function<void(const Event&)>& take_;
  Event event_;
  Event::Value* field_ = nullptr;  // the field of the next value
  std::size_t depth_ = 0;          // an event's members are at 2, its args' members at 3
  bool args_follow_ = false;
  bool in_args_ = false;
  bool is_array_ = false;
  std::size_t position_ = 0;
  std::string reason_;
};

std::optional<std::int64_t> Event::integer(Field field, std::int64_t low, std::int64_t high) const {
  const auto value = number(field);
  const bool fits = value && *value >= static_cast<double>(low) &&
                    *value <= static_cast<double>(high) && std::floor(*value) == *value;
  return fits ? std::optional(static_cast<std::int64_t>(*value)) : std::nullopt;
}

bool parse_events(std::string_view text, const std::string& path,
                  const std::function<void(const Event&)>& take) {
  EventHandler handler(take);
  if (json::sax_parse(text, &handler)) return false;
  if (!handler.is_array()) {
    throw CorruptFile(fmt::format("{}: {} (at byte 0)", path,
                                  text.empty() ? "the file is empty: its rank ended before it wrote"
                                               : "not a timeline; expected a JSON array"));
  }
  if (!handler.is_whole() && handler.position() >= text.size()) return true;
  const std::string_view before = text.substr(0, handler.position());
  throw CorruptFile(fmt::format("{}: {} (line {}, at byte {})", path, handler.reason(),
                                std::ranges::count(before, '\n') + 1, handler.position()));
}

}  // namespace paceline::report
