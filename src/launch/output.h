#pragma once

#include <functional>
#include <string_view>

namespace paceline::launch {

enum class Stream { out, err };

// Where a stream of a rank goes.
enum class Destination { console, file, file_and_console };

// Receives what a rank wrote to the console, in pieces that need not end at the end of a line.
using OutputSink = std::function<void(int local_rank, Stream stream, std::string_view bytes)>;

}  // namespace paceline::launch
