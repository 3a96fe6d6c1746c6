#include <gmock/gmock.h>
#include <sys/stat.h>
#include <zlib.h>

#include <paceline/error.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "data/idx.h"
#include "support/temporary_directory.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

using Bytes = std::vector<std::uint8_t>;

Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Bytes header(std::uint8_t type, const std::vector<std::uint32_t>& shape) {
  Bytes bytes = {0, 0, type, static_cast<std::uint8_t>(shape.size())};
  for (const std::uint32_t extent : shape) {
    for (const int shift : {24, 16, 8, 0}) {
      bytes.push_back(static_cast<std::uint8_t>(extent >> shift));
    }
  }
  return bytes;
}

Bytes ramp(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(7 * i + i / 251);
  return bytes;
}

Bytes gzip(const Bytes& plain) {
  z_stream stream{};
  EXPECT_EQ(::deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, 15 + 16, 8, Z_FILTERED), Z_OK);
  Bytes out(::deflateBound(&stream, plain.size()));
  stream.next_in = const_cast<Bytef*>(plain.data());
  stream.avail_in = static_cast<uInt>(plain.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(::deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  ::deflateEnd(&stream);
  return out;
}

const Bytes kImages = header(0x08, {3, 5, 4}) + ramp(60);

IdxArray parse(const Bytes& bytes) {
  return parse_idx(bytes, "a/file");
}

// Expects that `bytes` is rejected with the path, a byte and `reason`.
void expect_corrupt(const Bytes& bytes, const std::string& reason) {
  EXPECT_THAT([&] { parse(bytes); },
              ThrowsMessage<CorruptFile>(
                  AllOf(StartsWith("a/file: "), HasSubstr("at byte "), HasSubstr(reason))));
}

TEST(Idx, ReadsBytesPlainAndCompressed) {
  for (const Bytes& file : {kImages, gzip(kImages)}) {
    const IdxArray array = parse(file);
    EXPECT_EQ(array.type, IdxType::uint8);
    EXPECT_THAT(array.shape, ElementsAre(3, 5, 4));
    EXPECT_EQ(array.bytes, ramp(60));
  }
}

TEST(Idx, ReadsEveryElementType) {
  const auto read = [](std::uint8_t type, const Bytes& payload, auto value) {
    const IdxArray array = parse(header(type, {1}) + payload);
    EXPECT_EQ(static_cast<std::uint8_t>(array.type), type);
    auto got = value;
    ASSERT_EQ(array.bytes.size(), sizeof(got));
    std::memcpy(&got, array.bytes.data(), sizeof(got));
    EXPECT_EQ(got, value);
  };
  read(0x08, {0xfe}, std::uint8_t{254});
  read(0x09, {0xfe}, std::int8_t{-2});
  read(0x0B, {0x01, 0x02}, std::int16_t{258});
  read(0x0C, {0xff, 0xff, 0xff, 0xfe}, std::int32_t{-2});
  read(0x0D, {0x3f, 0xc0, 0x00, 0x00}, 1.5F);
  read(0x0E, {0xc0, 0x04, 0, 0, 0, 0, 0, 0}, -2.5);
}

TEST(Idx, ReadsAnEmptyArray) {
  EXPECT_TRUE(parse(header(0x08, {0, 28, 28})).bytes.empty());
  EXPECT_TRUE(parse(gzip(header(0x0D, {28, 0}))).bytes.empty());
}

TEST(Idx, ReadsSeveralGzipMembers) {
  const Bytes front(kImages.begin(), kImages.begin() + 20);
  const Bytes back(kImages.begin() + 20, kImages.end());
  EXPECT_EQ(parse(gzip(front) + gzip(back)).bytes, ramp(60));
}

TEST(Idx, ReadsMoreThanOneStep) {
  const Bytes payload = ramp((1 << 22) + 3);
  const Bytes file = header(0x08, {(1 << 22) + 3}) + payload;
  EXPECT_EQ(parse(file).bytes, payload);
  EXPECT_EQ(parse(gzip(file)).bytes, payload);
}

TEST(Idx, RejectsAFileTruncatedAtAnyByte) {
  for (const Bytes& file : {kImages, gzip(kImages)}) {
    for (std::size_t size = 0; size < file.size(); ++size) {
      SCOPED_TRACE(size);
      EXPECT_THROW(parse(Bytes(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size))),
                   CorruptFile);
    }
  }
}

TEST(Idx, NamesTheByteWhereATruncatedFileEnds) {
  const auto cut = [](const Bytes& file, std::ptrdiff_t size) {
    return Bytes(file.begin(), file.begin() + size);
  };
  expect_corrupt({}, "ends inside its magic number (at byte 0)");
  expect_corrupt(cut(kImages, 3), "ends inside its magic number (at byte 3)");
  expect_corrupt(cut(kImages, 10), "ends inside its dimensions (at byte 10)");
  expect_corrupt(cut(kImages, 75),
                 "3 x 5 x 4 need 60 bytes, but a file of this size holds at most 59");
  const Bytes zipped = gzip(kImages);
  // Only the checksum is missing.
  expect_corrupt(cut(zipped, std::ssize(zipped) - 1),
                 "the gzip stream is truncated (at byte 76 of the uncompressed data)");
  expect_corrupt(gzip(cut(kImages, 75)),
                 "truncated: its header declares 60 bytes of data (at byte 75 of the "
                 "uncompressed data)");
}

TEST(Idx, RejectsBytesAfterTheArray) {
  expect_corrupt(kImages + Bytes{0}, "the file does not (at byte 76)");
  expect_corrupt(gzip(kImages + Bytes{0}),
                 "the file does not (at byte 76 of the uncompressed data)");
  expect_corrupt(gzip(kImages) + gzip({0}), "the file does not (at byte 76");
  expect_corrupt(gzip(kImages) + Bytes(20, 0),
                 "the gzip stream is damaged: incorrect header check");
}

TEST(Idx, RejectsAWrongMagicNumber) {
  expect_corrupt(Bytes{1, 0, 8, 1, 0, 0, 0, 0}, "starts with 0x01000801");
  expect_corrupt(Bytes{0, 0, 7, 1, 0, 0, 0, 0}, "starts with 0x00000701");
  expect_corrupt(Bytes{0, 0, 0x0A, 1, 0, 0, 0, 0}, "starts with 0x00000a01");
  expect_corrupt(Bytes{0, 0, 8, 0, 0, 0, 0, 0}, "starts with 0x00000800");
  const std::string page = "<!DOCTYPE html><html></html>";
  expect_corrupt(Bytes(page.begin(), page.end()), "not an IDX file: it starts with 0x3c21444f");
}

TEST(Idx, RejectsDimensionsThatTheFileCannotHold) {
  constexpr std::uint32_t most = 0xffffffff;
  for (const bool compressed : {false, true}) {
    const auto check = [&](const Bytes& file, const std::string& reason) {
      expect_corrupt(compressed ? gzip(file) : file, reason);
    };
    check(header(0x08, {most, most, most}) + ramp(9),
          "more bytes than an int64 can count (at byte 4");
    check(header(0x0E, {most, 1 << 30}) + ramp(9), "more bytes than an int64 can count");
    check(header(0x08, std::vector<std::uint32_t>(255, 2)) + ramp(9), "more bytes than an int64");
    // Strides are products of the other dimensions.
    check(header(0x08, {0, most, most, most}), "more bytes than an int64 can count");
    // Two terabytes: must be rejected without allocating them.
    check(header(0x0E, {most, 64}) + ramp(9), "need 2199023255040 bytes");
  }
}

TEST(Idx, ReadsOrRejectsAFileWithFlippedBits) {
  std::mt19937 random(2024);
  const Bytes zipped = gzip(kImages);
  for (const Bytes& file : {kImages, zipped}) {
    for (int round = 0; round < 20000; ++round) {
      Bytes damaged = file;
      for (std::uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
        damaged[random() % damaged.size()] ^= static_cast<std::uint8_t>(1U << random() % 8);
      }
      try {
        const IdxArray array = parse(damaged);
        std::int64_t elements = 1;
        for (const std::int64_t extent : array.shape) elements *= extent;
        EXPECT_LE(elements, std::ssize(array.bytes));
      } catch (const CorruptFile&) {  // one of the two must happen
      }
    }
  }
}

TEST(Idx, DetectsADamagedPayloadByGzipsChecksum) {
  Bytes stored = gzip(kImages);
  stored[stored.size() - 6] ^= 1;
  expect_corrupt(stored, "the gzip stream is damaged: incorrect data check");
}

TEST(IdxFile, ReadsAFile) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "images.gz";
  const Bytes content = gzip(kImages);
  std::ofstream(path).write(reinterpret_cast<const char*>(content.data()), std::ssize(content));
  EXPECT_EQ(read_idx_file(path).bytes, ramp(60));
}

TEST(IdxFile, NamesTheReasonIfAFileCannotBeRead) {
  const test::TemporaryDirectory directory;
  EXPECT_THAT([&] { read_idx_file(directory.path() / "none"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("none"), HasSubstr("ENOENT"))));
  EXPECT_THAT([&] { read_idx_file(directory.path()); },
              ThrowsMessage<Error>(HasSubstr("is not a regular file")));
  // A file of another format is not read to its end.
  const auto huge = directory.path() / "huge";
  std::ofstream(huge) << "GIF89a";
  std::filesystem::resize_file(huge, std::uintmax_t{1} << 40);
  EXPECT_THAT([&] { read_idx_file(huge); },
              ThrowsMessage<CorruptFile>(HasSubstr("not an IDX file")));
  // Opening a pipe without a writer must not hang.
  const auto pipe = directory.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT([&] { read_idx_file(pipe); },
              ThrowsMessage<Error>(HasSubstr("is not a regular file")));
}

}  // namespace
}  // namespace paceline::data
