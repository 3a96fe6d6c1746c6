#include "base/printable.h"

#include <gtest/gtest.h>

namespace paceline::base {
namespace {

TEST(Printable, SpellsOutControlCharacters) {
  EXPECT_EQ(printable("a\tb\n\r"), "a\tb\n\\x0d");
  EXPECT_EQ(printable_line("a\x1b[2J\n\x7f"
                           "b"),
            "a\\x1b[2J\\x0a\\x7fb");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\u009b2J");  // a control character of eight bits
}

TEST(Printable, KeepsTextAndSpellsOutBytesThatAreNone) {
  EXPECT_EQ(printable("\xc3\xa9 \xe2\x82\xac"), "\xc3\xa9 \xe2\x82\xac");
  // A terminal may obey 9b.
  EXPECT_EQ(printable("\xff\x9b\xc3\xa9\xe2\x82"), "\\xff\\x9b\xc3\xa9\\xe2\\x82");
}

}  // namespace
}  // namespace paceline::base
