#include "checkpoint/zip_writer.h"

#include <algorithm>
#include <bit>
#include <concepts>
#include <limits>
#include <utility>

namespace paceline::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "as in the file");

constexpr std::uint64_t kIn64Bits = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint16_t kZip64Id = 0x0001;
constexpr std::uint16_t kZipVersion = 45;  // of the specification, since ZIP64
constexpr std::uint16_t kNoFlags = 0;
constexpr std::uint16_t kStored = 0;
constexpr std::uint16_t kMidnight = 0;
constexpr std::uint16_t kDate = (1 << 5) | 1;  // 1980-01-01, the earliest there is

template <typename... Numbers>
std::string bytes(Numbers... numbers) {
  std::string all;
  (all.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
  return all;
}

std::uint16_t length(const std::string& field) {
  return static_cast<std::uint16_t>(field.size());
}

// A number in a field of 16 or 32 bits, whose greatest value says that ZIP64 has it.
template <std::unsigned_integral T>
T short_form(std::uint64_t number) {
  return static_cast<T>(std::min<std::uint64_t>(number, std::numeric_limits<T>::max()));
}

// An extra field with what short forms have no place for.
std::string zip64_field(const std::vector<std::uint64_t>& numbers) {
  std::string content;
  for (const std::uint64_t number : numbers) {
    if (number >= kIn64Bits) content += bytes(number);
  }
  return content.empty() ? content : bytes(kZip64Id, length(content)) + content;
}

// An extra field after which, in an archive of `size` bytes, the content of a record is aligned.
std::string padding_field(std::uint64_t size) {
  constexpr std::uint16_t kPaddingId = 0x4246;  // PyTorch's
  constexpr std::uint64_t kAlignment = 64;
  const std::uint64_t with_header = size + 2 * sizeof(kPaddingId);
  const std::string padding((kAlignment - with_header % kAlignment) % kAlignment, 'Z');
  return bytes(kPaddingId, length(padding)) + padding;
}

}  // namespace

void ZipWriter::add(std::string name, std::string_view content) {
  Entry entry{std::move(name), crc32_of(content), content.size(), file_.size()};
  constexpr std::uint32_t kSignature = 0x04034b50;
  constexpr std::uint64_t kHeader = 30;
  const std::string zip64 = zip64_field({entry.size, entry.size});
  const std::string extra =
      zip64 + padding_field(entry.offset + kHeader + entry.name.size() + zip64.size());
  file_.write(bytes(kSignature, kZipVersion, kNoFlags, kStored, kMidnight, kDate, entry.crc32,
                    short_form<std::uint32_t>(entry.size), short_form<std::uint32_t>(entry.size),
                    length(entry.name), length(extra)) +
              entry.name + extra);
  file_.write(content);
  entries_.push_back(std::move(entry));
}

void ZipWriter::finish() {
  constexpr std::uint32_t kEntry = 0x02014b50;
  constexpr std::uint32_t kZip64End = 0x06064b50;
  constexpr std::uint32_t kZip64Locator = 0x07064b50;
  constexpr std::uint32_t kEnd = 0x06054b50;
  constexpr std::uint16_t kNoComment = 0;
  constexpr std::uint16_t kDisk = 0;
  constexpr std::uint32_t kDiskIn64 = 0;
  constexpr std::uint32_t kDisks = 1;
  constexpr std::uint16_t kIsBinary = 0;
  constexpr std::uint32_t kNoAttributes = 0;
  constexpr std::uint64_t kRestOfZip64End = 44;

  const std::uint64_t offset = file_.size();
  for (const Entry& entry : entries_) {
    const std::string extra = zip64_field({entry.size, entry.size, entry.offset});
    const auto size = short_form<std::uint32_t>(entry.size);
    file_.write(bytes(kEntry, kZipVersion, kZipVersion, kNoFlags, kStored, kMidnight, kDate,
                      entry.crc32, size, size, length(entry.name), length(extra), kNoComment, kDisk,
                      kIsBinary, kNoAttributes, short_form<std::uint32_t>(entry.offset)) +
                entry.name + extra);
  }
  const std::uint64_t end = file_.size();
  const std::uint64_t entries = entries_.size();
  const auto short_entries = short_form<std::uint16_t>(entries);
  if (offset >= kIn64Bits || end - offset >= kIn64Bits ||
      entries >= std::numeric_limits<std::uint16_t>::max()) {
    file_.write(bytes(kZip64End, kRestOfZip64End, kZipVersion, kZipVersion, kDiskIn64, kDiskIn64,
                      entries, entries, end - offset, offset));
    file_.write(bytes(kZip64Locator, kDiskIn64, end, kDisks));
  }
  file_.write(bytes(kEnd, kDisk, kDisk, short_entries, short_entries,
                    short_form<std::uint32_t>(end - offset), short_form<std::uint32_t>(offset),
                    kNoComment));
}

}  // namespace paceline::checkpoint
