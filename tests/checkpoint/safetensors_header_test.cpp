#include "checkpoint/safetensors_header.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string length_of(std::uint64_t length) {
  return {reinterpret_cast<const char*>(&length), sizeof(length)};
}

std::string file_of(const std::string& header, std::size_t bytes) {
  return length_of(header.size()) + header + std::string(bytes, '\x01');
}

std::string refusal(const std::string& file) {
  try {
    parse_safetensors_header(file, "net.safetensors");
  } catch (const CorruptFile& error) {
    return error.what();
  }
  return "accepted";
}

TEST(SafetensorsHeader, NamesTheTensorsInTheOrderOfTheirBytes) {
  const std::string text = R"({"b":{"dtype":"F32","shape":[2,3],"data_offsets":[6,30]},)"
                           R"("__metadata__":{"format":"pt"},)"
                           R"("a":{"shape":[3],"data_offsets":[0,6],"dtype":"BF16"},)"
                           R"("none":{"dtype":"I64","shape":[0,5],"data_offsets":[30,30]},)"
                           R"("one":{"dtype":"U8","shape":[],"data_offsets":[30,31]}}   )";
  const auto header = parse_safetensors_header(file_of(text, 31), "file");
  EXPECT_THAT(header.metadata, ElementsAre(std::pair("format", "pt")));
  ASSERT_EQ(header.tensors.size(), 4U);
  const std::uint64_t data = 8 + text.size();
  const auto& [a, b, none, one] =
      std::tie(header.tensors[0], header.tensors[1], header.tensors[2], header.tensors[3]);
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, "BF16");
  EXPECT_THAT(a.shape, ElementsAre(3));
  EXPECT_EQ(a.begin, data);
  EXPECT_EQ(a.size, 6U);
  EXPECT_EQ(b.begin, data + 6);
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(none.size, 0U);
  EXPECT_THAT(one.shape, ElementsAre());
  EXPECT_EQ(one.size, 1U);
}

TEST(SafetensorsHeader, RefusesWhatTheFormatDoesNotAllow) {
  const auto with = [](const std::string& members, std::size_t bytes = 4) {
    return refusal(file_of("{\"t\":{" + members + "}}", bytes));
  };
  EXPECT_THAT(refusal(""), StartsWith("net.safetensors: not a safetensors file: it has 0 bytes"));
  EXPECT_THAT(refusal(length_of(100'000'001)), HasSubstr("1 to 100000000 are allowed (at byte 0)"));
  EXPECT_THAT(refusal(length_of(0)), HasSubstr("its header would have 0 bytes"));
  EXPECT_THAT(refusal(length_of(~std::uint64_t{0})), HasSubstr("1 to 100000000 are allowed"));
  EXPECT_THAT(refusal(length_of(9) + "{}"),
              HasSubstr("the header has 9 bytes, and the file ends after 2 (at byte 10)"));
  EXPECT_THAT(refusal(file_of(" {}", 0)), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal(file_of("{\"t\":", 0)), HasSubstr("the header is no JSON at byte 1"));
  EXPECT_THAT(refusal(file_of(std::string("{}\0x", 4), 0)), HasSubstr("contains a NUL"));
  EXPECT_THAT(refusal(file_of("{} x", 0)), HasSubstr("is no JSON at byte"));
  EXPECT_THAT(refusal(file_of("{\"\xff\":1}", 0)), HasSubstr("is no JSON at byte"));
  EXPECT_THAT(refusal(file_of("{}", 1)), HasSubstr("1 bytes belong to no tensor (at byte 10)"));
  EXPECT_THAT(refusal(file_of("{\"t\":1}", 0)), HasSubstr("tensor 't' has a number where none"));
  EXPECT_THAT(refusal(file_of("{\"t\":[]}", 0)), HasSubstr("tensor 't' has a list where none"));
  EXPECT_THAT(refusal(file_of("{\"t\":{},\"t\":{}}", 0)), HasSubstr("tensor 't' occurs twice"));
  EXPECT_THAT(refusal(file_of(R"({"__metadata__":{"a":1}})", 0)), HasSubstr("a number where none"));
  EXPECT_THAT(refusal(file_of(R"({"__metadata__":{"a":"1","a":"2"}})", 0)),
              HasSubstr("has 'a' twice"));
  EXPECT_THAT(refusal(file_of(R"({"__metadata__":{},"__metadata__":{}})", 0)),
              HasSubstr("'__metadata__' occurs twice"));
  EXPECT_THAT(with(""), HasSubstr("needs a dtype, a shape and two data_offsets"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1)"),
              HasSubstr("has an unknown member 'more'"));
  EXPECT_THAT(with(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"),
              HasSubstr("'dtype', or has it twice"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"),
              HasSubstr("two data_offsets"));
  EXPECT_THAT(with(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"),
              HasSubstr("has the unknown type 'F31'"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"),
              HasSubstr("has the number -1, which must not be negative"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"),
              HasSubstr("has the number 1.0, which is no integer"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4])"),
              HasSubstr("which is no integer of 64 bits"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"),
              HasSubstr("has a list where none belongs"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"),
              HasSubstr("has the bytes 0 to 8, of 4 that follow the header"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"),
              HasSubstr("has the bytes 4 to 0"));
  EXPECT_THAT(with(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
              HasSubstr("has 4 bytes, which 2 elements of F32 do not fill"));
  EXPECT_THAT(with(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])", 1),
              HasSubstr("which 3 elements of F4 do not fill"));
  // 2^62 elements of 4 bytes are 0 modulo 2^64.
  EXPECT_THAT(with(R"("dtype":"F32","shape":[2147483648,2147483648],"data_offsets":[0,0])", 0),
              HasSubstr("elements of F32 do not fill"));
  EXPECT_THAT(with(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0),
              HasSubstr("is too large"));
}

TEST(SafetensorsHeader, RefusesGapsAndOverlaps) {
  const auto two = [](const std::string& first, const std::string& second, std::size_t bytes) {
    return refusal(file_of(fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":{}}},)"
                                       R"("b":{{"dtype":"U8","shape":[4],"data_offsets":{}}}}})",
                                       first, second),
                           bytes));
  };
  EXPECT_EQ(two("[0,4]", "[4,8]", 8), "accepted");
  EXPECT_EQ(two("[4,8]", "[0,4]", 8), "accepted");
  EXPECT_THAT(two("[0,4]", "[5,9]", 9), AllOf(HasSubstr("tensor 'b' begins at byte"),
                                              HasSubstr("and the one before ends at byte")));
  EXPECT_THAT(two("[0,4]", "[3,7]", 7), HasSubstr("tensor 'b' begins at byte"));
  EXPECT_THAT(two("[0,4]", "[0,4]", 4), HasSubstr("tensor 'b' begins at byte"));
  EXPECT_THAT(two("[1,5]", "[5,9]", 9), HasSubstr("tensor 'a' begins at byte"));
  EXPECT_THAT(two("[0,4]", "[4,8]", 9), HasSubstr("1 bytes belong to no tensor"));
}

// Deep nesting must not use up the stack.
TEST(SafetensorsHeader, RefusesNestedLists) {
  EXPECT_THAT(refusal(file_of("{\"t\":" + std::string(1'000'000, '['), 0)),
              HasSubstr("has a list where none belongs"));
}

TEST(SafetensorsHeader, IsReadAsItIsWritten) {
  SafetensorsHeader header{{}, {{"text", "line\n\"quoted\" \u00fc"}}};
  header.tensors.push_back({"first", "F64", {2, 2}, 0, 32});
  header.tensors.push_back({"", "U8", {3}, 0, 3});
  const std::string bytes = make_safetensors_header(header);
  EXPECT_EQ(bytes.size() % 64, 0U);
  const auto read = parse_safetensors_header(bytes + std::string(35, 'x'), "file");
  EXPECT_EQ(read.metadata, header.metadata);
  ASSERT_EQ(read.tensors.size(), 2U);
  EXPECT_EQ(read.tensors[0].name, "first");
  EXPECT_EQ(read.tensors[0].begin, bytes.size());
  EXPECT_EQ(read.tensors[1].name, "");
  EXPECT_EQ(read.tensors[1].begin, bytes.size() + 32);
  header.metadata["text"] = "\xff";
  EXPECT_THROW(make_safetensors_header(header), UsageError);
}

}  // namespace
}  // namespace paceline::checkpoint
