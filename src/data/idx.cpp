#include "data/idx.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "base/input_file.h"
#include "data/byte_source.h"

namespace paceline::data {
namespace {

// 0 for a code outside the format.
std::uint64_t element_size(std::uint8_t type) {
  switch (static_cast<IdxType>(type)) {
    case IdxType::uint8:
    case IdxType::int8:
      return 1;
    case IdxType::int16:
      return 2;
    case IdxType::int32:
    case IdxType::float32:
      return 4;
    case IdxType::float64:
      return 8;
  }
  return 0;
}

std::uint32_t read_word(ByteSource& source, const char* what) {
  std::array<std::uint8_t, 4> word{};
  if (source.read(word) != word.size()) {
    source.fail(source.offset(), fmt::format("the IDX file ends inside its {}", what));
  }
  return std::uint32_t{word[0]} << 24 | std::uint32_t{word[1]} << 16 | std::uint32_t{word[2]} << 8 |
         std::uint32_t{word[3]};
}

void read_header(ByteSource& source, IdxArray& array) {
  const std::uint32_t magic = read_word(source, "magic number");
  const auto type = static_cast<std::uint8_t>(magic >> 8);
  const std::uint32_t dimensions = magic & 0xff;
  if (magic >> 16 != 0 || element_size(type) == 0 || dimensions == 0) {
    source.fail(0, fmt::format("not an IDX file: it starts with 0x{:08x}; IDX's magic number is "
                               "two zero bytes, a type (08, 09, 0b, 0c, 0d, 0e) and the number of "
                               "dimensions (at least 1)",
                               magic));
  }
  array.type = static_cast<IdxType>(type);
  for (std::uint32_t i = 0; i < dimensions; ++i) {
    array.shape.push_back(read_word(source, "dimensions"));
  }
}

// The number of bytes that the header declares. A zero dimension makes an empty array, but the
// other dimensions must be valid too, since strides are computed from them.
std::uint64_t payload_size(const ByteSource& source, const IdxArray& array) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  const auto fail = [&](std::string_view what) {
    source.fail(4, fmt::format("the dimensions {} need {}", fmt::join(array.shape, " x "), what));
  };
  std::uint64_t size = element_size(static_cast<std::uint8_t>(array.type));
  for (const std::int64_t extent : array.shape) {
    const bool overflow =
        __builtin_mul_overflow(size, static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 1)),
                               &size) ||
        size > most;
    if (overflow) fail("more bytes than an int64 can count");
  }
  if (std::ranges::find(array.shape, 0) != array.shape.end()) return 0;
  const std::uint64_t available = source.limit() - std::min(source.limit(), source.offset());
  if (size > available) {
    fail(fmt::format("{} bytes, but a file of this size holds at most {}", size, available));
  }
  return size;
}

// Grows with the data that were read, so that a wrong header costs no memory.
void read_payload(ByteSource& source, std::uint64_t size, std::vector<std::uint8_t>& bytes) {
  constexpr std::uint64_t kStep = 1 << 20;
  while (bytes.size() < size) {
    const std::size_t begin = bytes.size();
    bytes.resize(std::min(size, begin + std::max<std::uint64_t>(kStep, begin)));
    const auto rest = std::span(bytes).subspan(begin);
    if (source.read(rest) != rest.size()) {
      source.fail(
          source.offset(),
          fmt::format("the IDX file is truncated: its header declares {} bytes of data", size));
    }
  }
}

void to_native_order(std::vector<std::uint8_t>& bytes, std::uint64_t size) {
  if constexpr (std::endian::native == std::endian::big) return;
  const auto step = static_cast<std::ptrdiff_t>(size);
  for (auto at = bytes.begin(); step > 1 && at != bytes.end(); at += step) {
    std::reverse(at, at + step);
  }
}

// Magic number and dimensions of the longest header.
constexpr std::size_t kMaxHeader = 4 + 255 * 4;

std::vector<std::uint8_t> read_content(const std::filesystem::path& path) {
  base::InputFile file(path);
  std::vector<std::uint8_t> content;
  file.read(content, std::min(file.size(), kMaxHeader));
  // The first bytes show whether this is an IDX file, however long it is.
  ByteSource head(content, path.string());
  IdxArray ignored;
  if (!head.compressed()) read_header(head, ignored);
  file.read(content, file.size() - content.size());
  return content;
}

}  // namespace

IdxArray parse_idx(std::span<const std::uint8_t> file, const std::string& path) {
  ByteSource source(file, path);
  IdxArray array;
  read_header(source, array);
  const std::uint64_t size = payload_size(source, array);
  read_payload(source, size, array.bytes);
  const std::uint64_t end = source.offset();
  std::array<std::uint8_t, 1> extra{};
  if (source.read(extra) != 0) source.fail(end, "the array ends here, but the file does not");
  to_native_order(array.bytes, element_size(static_cast<std::uint8_t>(array.type)));
  return array;
}

IdxArray read_idx_file(const std::filesystem::path& path) {
  return parse_idx(read_content(path), path.string());
}

}  // namespace paceline::data
