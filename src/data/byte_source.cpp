#include "data/byte_source.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace paceline::data {
namespace {

constexpr int kGzipOnly = 15 + 16;  // the largest window, and gzip's wrapper only
constexpr std::uint64_t kMaxDeflateRatio = 1032;

uInt clamp(std::size_t size) {
  return static_cast<uInt>(std::min<std::size_t>(size, std::numeric_limits<uInt>::max()));
}

}  // namespace

ByteSource::ByteSource(std::span<const std::uint8_t> file, std::string path)
    : file_(file),
      path_(std::move(path)),
      compressed_(file.size() >= 2 && file[0] == 0x1f && file[1] == 0x8b) {
  if (compressed_ && ::inflateInit2(&stream_, kGzipOnly) != Z_OK) throw std::bad_alloc();
}

ByteSource::~ByteSource() {
  if (compressed_) ::inflateEnd(&stream_);
}

std::size_t ByteSource::read(std::span<std::uint8_t> to) {
  return compressed_ ? inflate(to) : copy(to);
}

std::uint64_t ByteSource::limit() const {
  return compressed_ ? file_.size() * kMaxDeflateRatio : file_.size();
}

void ByteSource::fail(std::uint64_t offset, std::string_view reason) const {
  throw CorruptFile(fmt::format("{}: {} (at byte {}{})", path_, reason, offset,
                                compressed_ ? " of the uncompressed data" : ""));
}

std::size_t ByteSource::copy(std::span<std::uint8_t> to) {
  const std::size_t count = std::min<std::size_t>(to.size(), file_.size() - offset_);
  if (count > 0) std::memcpy(to.data(), file_.data() + offset_, count);
  offset_ += count;
  return count;
}

std::size_t ByteSource::inflate(std::span<std::uint8_t> to) {
  std::size_t count = 0;
  while (count < to.size() && !ended_) {
    const uInt input = clamp(file_.size() - consumed_);
    const uInt room = clamp(to.size() - count);
    stream_.next_in = const_cast<Bytef*>(file_.data() + consumed_);  // zlib only reads it
    stream_.avail_in = input;
    stream_.next_out = to.data() + count;
    stream_.avail_out = room;
    const int code = ::inflate(&stream_, Z_NO_FLUSH);
    consumed_ += input - stream_.avail_in;
    count += room - stream_.avail_out;
    offset_ += room - stream_.avail_out;
    if (code == Z_STREAM_END) {
      // Another member may follow; zlib reports anything else as damage.
      ended_ = consumed_ == file_.size();
      ::inflateReset(&stream_);
    } else if (code == Z_BUF_ERROR) {
      fail(offset_, "the gzip stream is truncated");
    } else if (code == Z_MEM_ERROR) {
      throw std::bad_alloc();
    } else if (code != Z_OK) {
      fail(offset_, fmt::format("the gzip stream is damaged: {}",
                                stream_.msg != nullptr ? stream_.msg : "unknown reason"));
    }
  }
  return count;
}

}  // namespace paceline::data
