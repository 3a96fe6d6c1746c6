#pragma once

#include <functional>
#include <string_view>

namespace paceline::launch {

enum class Stream { out, err };

// Receives what a rank wrote, in pieces that need not end at the end of a line.
using OutputSink = std::function<void(int local_rank, Stream stream, std::string_view bytes)>;

}  // namespace paceline::launch
