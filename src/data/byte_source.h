#pragma once

#include <zlib.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace paceline::data {

// Reads a file's content from front to back, and decompresses it if it starts with gzip's magic.
// `file` must outlive it. Throws CorruptFile if the compressed stream is damaged or truncated.
class ByteSource {
 public:
  ByteSource(std::span<const std::uint8_t> file, std::string path);
  ~ByteSource();
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  // Fills `to` from the front and returns the number of bytes read: fewer only at the end.
  std::size_t read(std::span<std::uint8_t> to);

  bool compressed() const { return compressed_; }

  // How many bytes have been read, counted after decompression.
  std::uint64_t offset() const { return offset_; }
  // An upper bound of the bytes that can be read in total.
  std::uint64_t limit() const;

  // Throws CorruptFile that names the byte at `offset`.
  [[noreturn]] void fail(std::uint64_t offset, std::string_view reason) const;

 private:
  std::size_t copy(std::span<std::uint8_t> to);
  std::size_t inflate(std::span<std::uint8_t> to);

  std::span<const std::uint8_t> file_;
  std::string path_;
  bool compressed_;
  bool ended_ = false;        // the last gzip member is complete, and its checksum correct
  std::size_t consumed_ = 0;  // of file_
  std::uint64_t offset_ = 0;
  z_stream stream_{};
};

}  // namespace paceline::data
