#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "trace/cpu_use.h"
#include "trace/node.h"
#include "trace/span.h"

namespace paceline::trace {

// Events as they are written to the file, each preceded by a comma and a newline. docs/timeline.md
// describes them.

inline constexpr int kFormatVersion = 1;

std::string_view name_of(Kind kind);
std::optional<Kind> kind_of(std::string_view name);

void append_span(std::string& text, int rank, const Span& span);
std::string job_event(int rank, int size, const Node& node = {});
std::string bucket_event(int rank, std::uint64_t model, int bucket, std::uint64_t bytes,
                         std::string_view parameters);
std::string group_event(int rank, std::uint64_t model, std::span<const int> ranks);
std::string reduction_event(int rank, std::uint64_t model, const ReductionCost& cost);
std::string model_event(int rank, std::uint64_t model);
std::string device_event(int rank, std::uint64_t model);
std::string cpu_event(int rank, const CpuUse& use);
void append_thread_event(std::string& text, int rank, const ThreadUse& use);
std::string dropped_event(int rank, std::uint64_t spans);
std::string full_event(int rank);

}  // namespace paceline::trace
