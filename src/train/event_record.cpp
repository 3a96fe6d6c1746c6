#include "train/event_record.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace paceline::train {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  constexpr std::uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, reflected
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    table[byte] = crc;
  }
  return table;
}

template <typename T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

// A checksum of data that has checksums in it would be too regular.
std::string masked_crc(std::string_view data) {
  constexpr std::uint32_t kDelta = 0xa282ead8;
  return bytes_of(std::rotr(crc32c(data), 15) + kDelta);
}

std::string record_of(const std::string& message) {
  const std::string length = bytes_of(static_cast<std::uint64_t>(message.size()));
  return length + masked_crc(length) + message + masked_crc(message);
}

// Fields of Protocol Buffers, by their number.
enum class WireType { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
std::string key(int number, WireType type) {
  return varint(static_cast<std::uint64_t>(number) << 3 | static_cast<std::uint64_t>(type));
}
std::string field(int number, std::int64_t value) {
  return key(number, WireType::varint) + varint(static_cast<std::uint64_t>(value));
}
std::string field(int number, double value) {
  return key(number, WireType::fixed64) + bytes_of(value);
}
std::string field(int number, float value) {
  return key(number, WireType::fixed32) + bytes_of(value);
}
std::string field(int number, const std::string& value) {
  return key(number, WireType::bytes) + varint(value.size()) + value;
}

// Of the messages in event.proto and summary.proto.
constexpr int kEventTime = 1;
constexpr int kEventStep = 2;
constexpr int kEventVersion = 3;
constexpr int kEventSummary = 5;
constexpr int kEventSessionLog = 7;
constexpr int kSummaryValue = 1;
constexpr int kValueTag = 1;
constexpr int kValueSimple = 2;
constexpr int kSessionStatus = 1;
constexpr std::int64_t kSessionStart = 1;

}  // namespace

std::uint32_t crc32c(std::string_view data) {
  static constexpr auto kTable = make_crc_table();
  std::uint32_t crc = ~0U;
  for (const char byte : data) {
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

std::string version_record(double time) {
  return record_of(field(kEventTime, time) + field(kEventVersion, std::string("brain.Event:2")));
}

std::string purge_record(double time, std::int64_t step) {
  return record_of(field(kEventTime, time) + field(kEventStep, step) +
                   field(kEventSessionLog, field(kSessionStatus, kSessionStart)));
}

std::string scalars_record(double time, std::int64_t step,
                           const std::map<std::string, double>& values) {
  std::string summary;
  for (const auto& [tag, value] : values) {
    summary += field(kSummaryValue,
                     field(kValueTag, tag) + field(kValueSimple, static_cast<float>(value)));
  }
  return record_of(field(kEventTime, time) + field(kEventStep, step) +
                   field(kEventSummary, summary));
}

}  // namespace paceline::train
