#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace paceline::train {

// Records of TensorBoard's event files: TensorFlow's core/lib/io/record_writer.h (TFRecord) around
// messages of core/util/event.proto in the encoding of Protocol Buffers. `time`: in seconds since
// 1970.

// The first of a file.
std::string version_record(double time);
// Values of a step must be discarded that are in earlier files, from this step on.
std::string purge_record(double time, std::int64_t step);
// The values of a step, by tag.
std::string scalars_record(double time, std::int64_t step,
                           const std::map<std::string, double>& values);

// The CRC-32C of RFC 3720.
std::uint32_t crc32c(std::string_view data);

}  // namespace paceline::train
