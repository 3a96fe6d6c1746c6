#include "checkpoint/pickle.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "support/thoroughness.h"

namespace paceline::checkpoint {
namespace {

using namespace std::string_view_literals;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
using Kind = PickleValue::Kind;

std::string show(const PickleValue& value);

std::string show(const std::vector<const PickleValue*>& values) {
  std::vector<std::string> all;
  for (const auto* const value : values) all.push_back(show(*value));
  return fmt::format("{}", fmt::join(all, ", "));
}

std::string show_items(const PickleValue& value) {
  std::vector<std::string> all;
  for (const auto& [key, stored] : value.items) all.push_back(show(*key) + ": " + show(*stored));
  return fmt::format("{}", fmt::join(all, ", "));
}

// As Python shows it, but for calls.
std::string show(const PickleValue& value) {
  switch (value.kind) {
    case Kind::none:
      return "None";
    case Kind::boolean:
      return value.boolean ? "True" : "False";
    case Kind::integer:
      return std::to_string(value.integer);
    case Kind::real:
      return fmt::format("{}", value.real);
    case Kind::text:
      return "'" + value.text + "'";
    case Kind::bytes:
      return fmt::format("b{}", std::vector<unsigned char>(value.text.begin(), value.text.end()));
    case Kind::list:
      return "[" + show(value.elements) + "]";
    case Kind::tuple:
      return "(" + show(value.elements) + ")";
    case Kind::dict:
      return "{" + show_items(value) + "}";
    case Kind::set:
      return "set(" + show(value.elements) + ")";
    case Kind::global:
      return value.text;
    case Kind::persistent:
      return "persistent " + show(value.elements);
    case Kind::call:
      return fmt::format("{}({}){}{}{}", value.callee->text, show(value.arguments->elements),
                         value.appended.empty() ? "" : " [" + show(value.appended) + "]",
                         value.items.empty() ? "" : " {" + show_items(value) + "}",
                         value.state == nullptr ? "" : " state " + show(*value.state));
  }
  return "?";
}

std::string shown(std::string_view pickle) {
  return show(*parse_pickle(pickle, "x.pt").root);
}

std::string problem(std::string_view pickle) {
  try {
    parse_pickle(pickle, "x.pt");
  } catch (const CorruptFile& error) {
    return std::string("corrupt: ") + error.what();
  } catch (const UsageError& error) {
    return std::string("unsupported: ") + error.what();
  }
  return "none";
}

// pickle.dumps(..., protocol).
constexpr std::string_view kScalars2 =
    "\x80\x02(N\x88\x89K\x00K\xffM\xff\xffJ\xff\xff\xff\xff\x8a\x05\x00\x00\x00\x80\x00\x8a\x06\x00"
    "\x00\x00\x00\x00\xff\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fG@\x04\x00\x00\x00\x00\x00\x00X"
    "\x07\x00\x00\x00Gr\xc3\xbc\xc3\x9f"
    "eq\x00tq\x01."sv;
constexpr std::string_view kScalars4 =
    "\x80\x04\x95?\x00\x00\x00\x00\x00\x00\x00(N\x88\x89K\x00K\xffM\xff\xffJ\xff\xff\xff\xff\x8a"
    "\x05\x00\x00\x00\x80\x00\x8a\x06\x00\x00\x00\x00\x00\xff\x8a\x08\xff\xff\xff\xff\xff\xff\xff"
    "\x7fG@\x04\x00\x00\x00\x00\x00\x00\x8c\x07Gr\xc3\xbc\xc3\x9f"
    "e\x94t\x94."sv;
constexpr std::string_view kContainers2 =
    "\x80\x02}q\x00(X\x01\x00\x00\x00"
    "aq\x01]q\x02(K\x01)K\x02\x85q\x03(K\x03K\x04K\x05K\x06tq\x04"
    "eK\x03}q\x05u."sv;
constexpr std::string_view kContainers4 =
    "\x80\x04\x95#\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01"
    "a\x94]\x94(K\x01)K\x02\x85\x94(K\x03K\x04K\x05K\x06t\x94"
    "eK\x03}\x94u."sv;
constexpr std::string_view kOrdered2 =
    "\x80\x02"
    "ccollections\nOrderedDict\nq\x00)Rq\x01X\x01\x00\x00\x00xq\x02K\x01s."sv;
constexpr std::string_view kOrdered4 =
    "\x80\x04\x95)\x00\x00\x00\x00\x00\x00\x00\x8c\x0b"
    "collections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94\x8c\x01x\x94K\x01s."sv;
// [s, s] with s = [7].
constexpr std::string_view kShared2 =
    "\x80\x02]q\x00(]q\x01K\x07"
    "ah\x01"
    "e."sv;
// r = []; r.append(r).
constexpr std::string_view kSelf2 =
    "\x80\x02]q\x00h\x00"
    "a."sv;

TEST(Pickle, IsReadAsPythonWritesIt) {
  const std::string scalars =
      "(None, True, False, 0, 255, 65535, -1, 2147483648, -1099511627776, 9223372036854775807, "
      "2.5, "
      "'Grüße')";
  EXPECT_EQ(shown(kScalars2), scalars);
  EXPECT_EQ(shown(kScalars4), scalars);
  const std::string containers = "{'a': [1, (), (2), (3, 4, 5, 6)], 3: {}}";
  EXPECT_EQ(shown(kContainers2), containers);
  EXPECT_EQ(shown(kContainers4), containers);
  EXPECT_EQ(shown(kOrdered2), "collections.OrderedDict() {'x': 1}");
  EXPECT_EQ(shown(kOrdered4), "collections.OrderedDict() {'x': 1}");
  EXPECT_EQ(shown("\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00"
                  "C\x02\x00\xff\x94."sv),
            "b[0, 255]");
  EXPECT_EQ(shown("\x80\x05\x95\x0d\x00\x00\x00\x00\x00\x00\x00\x96\x02\x00\x00\x00\x00\x00\x00\x00"
                  "xy\x94."sv),
            "b[120, 121]");
  EXPECT_EQ(shown("\x80\x04\x95\x07\x00\x00\x00\x00\x00\x00\x00\x8f\x94(K\x04\x90."sv), "set(4)");
  EXPECT_EQ(shown("\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00(K\x01\x91\x94."sv), "set(1)");
}

TEST(Pickle, AnObjectIsItsClassWithArgumentsItemsAndState) {
  EXPECT_EQ(shown("\x80\x02"
                  "cnet\nModel\n(K\x01t\x81(K\x02K\x03"
                  "e(K\x04K\x05u}K\x06K\x07sb."sv),
            "net.Model(1) [2, 3] {4: 5} state {6: 7}");
  EXPECT_EQ(shown("\x80\x02K\x01\x85Q."sv), "persistent (1)");
}

// pickle.dumps(Outer.Inner(), 2) calls getattr.
TEST(Pickle, AClassInsideOfAClassHasItsName) {
  EXPECT_EQ(shown("\x80\x02"
                  "c__builtin__\ngetattr\nc__main__\nOuter\nX\x05\x00\x00\x00"
                  "Inner\x86R)\x81."sv),
            "__main__.Outer.Inner()");
}

TEST(Pickle, WhatSeveralValuesReferToIsOneValue) {
  const Pickle pickle = parse_pickle(kShared2, "x.pt");
  ASSERT_EQ(show(*pickle.root), "[[7], [7]]");
  EXPECT_EQ(pickle.root->elements[0], pickle.root->elements[1]);
  const Pickle again = parse_pickle(write_pickle(pickle), "again.pt");
  ASSERT_EQ(show(*again.root), "[[7], [7]]");
  EXPECT_EQ(again.root->elements[0], again.root->elements[1]);
}

TEST(Pickle, IsWrittenAsItIsRead) {
  for (const std::string_view pickle : {kScalars2, kContainers4, kOrdered4}) {
    EXPECT_EQ(shown(write_pickle(parse_pickle(pickle, "x.pt"))), shown(pickle));
  }
  Pickle least;
  least.root = &least.add_integer(std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(shown(write_pickle(least)), "-9223372036854775808");
  Pickle object;
  PickleValue& call = object.add_call(object.add_text(Kind::global, "net.sub.Model"),
                                      {&object.add_sequence(Kind::persistent, {least.root})});
  call.appended = {least.root};
  call.items = {{least.root, least.root}};
  call.state = least.root;
  object.root = &call;
  EXPECT_EQ(shown(write_pickle(object)), show(call));
}

TEST(Pickle, WritesOnlyWhatProtocol2Has) {
  for (const Kind kind : {Kind::bytes, Kind::set}) {
    Pickle pickle;
    pickle.root = &pickle.add_text(kind, "x");
    EXPECT_THAT([&] { write_pickle(pickle); },
                ThrowsMessage<UsageError>(HasSubstr("no bytes and no sets")));
  }
  Pickle pickle;
  pickle.root = &pickle.add_text(Kind::text, "\xff");
  EXPECT_THAT([&] { write_pickle(pickle); }, ThrowsMessage<UsageError>(HasSubstr("UTF-8 only")));
}

TEST(Pickle, EndsAnywhereIsCorrupt) {
  for (const std::string_view pickle :
       {kScalars2, kScalars4, kContainers2, kContainers4, kOrdered2, kOrdered4}) {
    for (std::size_t size = 0; size < pickle.size(); ++size) {
      EXPECT_THAT(problem(pickle.substr(0, size)), StartsWith("corrupt: x.pt: the pickle "));
    }
  }
}

TEST(Pickle, RefusesWhatIsMalformedAndNamesTheByte) {
  const std::vector<std::pair<std::string_view, std::string>> cases{
      {"I1\n."sv, "is not of protocol 2 or later, at byte 0"},
      {"\x80\x06N."sv, "is of a protocol later than 5, at byte 0"},
      {"\x80\x02N.N"sv, "continues after its end"},
      {"\x80\x02."sv, "needs a value where there is none, at byte 2"},
      {"\x80\x02N(."sv, "needs a value where there is none, at byte 4"},
      {"\x80\x02N(N\x86."sv, "needs a value where there is none, at byte 5"},
      {"\x80\x02t."sv, "needs a mark where there is none, at byte 2"},
      {"\x80\x02h\x05."sv, "refers to value 5 of 0, at byte 2"},
      {"\x80\x02N(NNu."sv, "sets an item of a value that is not a dict, at byte 6"},
      {"\x80\x02}(Nu."sv, "has a key without a value, at byte 5"},
      {"\x80\x02}Na."sv, "appends to a value that is not a list or set, at byte 4"},
      {"\x80\x02](N\x90."sv, "appends to a value that is not a list or set, at byte 5"},
      {"\x80\x02N)R."sv, "calls a value that is not a class or function, at byte 4"},
      {"\x80\x02"
       "ca\nb\nNR."sv,
       "calls a function without a tuple of arguments, at byte 8"},
      {"\x80\x02}}b."sv, "sets the state of a value that is not an object, at byte 4"},
      {"\x80\x04NN\x93."sv, "has a name that is not a text, at byte 4"},
  };
  for (const auto& [pickle, expected] : cases) {
    EXPECT_THAT(problem(pickle), HasSubstr("corrupt: x.pt: the pickle " + expected));
  }
  EXPECT_EQ(problem("\x80\x02N(Nt\x86."sv), "none");
}

TEST(Pickle, RefusesWhatHasNoCounterpart) {
  EXPECT_EQ(problem("\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."sv),
            "unsupported: x.pt: the pickle has an integer outside of int64, at byte 2, which "
            "Paceline does not read");
  EXPECT_THAT(problem("\x80\x02I1\n."sv), HasSubstr("unsupported: x.pt: the pickle has the opcode "
                                                    "0x49, at byte 2"));
  EXPECT_THAT(problem(kSelf2), HasSubstr("has a value that contains itself"));
  const auto nested = [](std::size_t depth) {
    return "\x80\x02" + std::string(depth, ']') + std::string(depth - 1, 'a') + ".";
  };
  EXPECT_EQ(problem(nested(kMaxNesting)), "none");
  const std::size_t deep = test::kSanitized ? 100'000 : 1'000'000;  // enough for their stack frames
  EXPECT_THAT(problem(nested(deep)), HasSubstr("is nested deeper than 1000"));
}

}  // namespace
}  // namespace paceline::checkpoint
