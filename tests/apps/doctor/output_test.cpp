#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "output/json.h"
#include "output/text.h"

namespace paceline::doctor {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const Group kGroup{"some_group",
                   {{.name = "first"},
                    {.name = "with_text", .text = "fine"},
                    {.name = "second"},
                    {.name = "bad", .status = Status::error, .text = "why", .advice = "do this"}}};

TEST(DoctorText, AlignsAndJoinsWhatIsSilent) {
  EXPECT_EQ(text_of(kGroup, false),
            "some group\n"
            "  ok       first, second\n"
            "  ok       with text       fine\n"
            "  error    bad             why\n"
            "                           -> do this\n");
}

TEST(DoctorText, BreaksLinesAndHidesControlCharacters) {
  const std::string word(40, 'x');
  const Group group{"g", {{.name = "n", .text = word + " " + word + " end\nnext \033[31m"}}};
  const std::string indent(27, ' ');
  EXPECT_EQ(text_of(group, false), "g\n  ok       n               " + word + "\n" + indent + word +
                                       " end\n" + indent + "next ?[31m\n");
}

TEST(DoctorText, HasColoursOnRequest) {
  EXPECT_THAT(text_of(kGroup, false), Not(HasSubstr("\033")));
  EXPECT_THAT(text_of(kGroup, true), HasSubstr("\033[1;31merror   \033[0m bad"));
}

TEST(DoctorText, CountsErrorsAndWarnings) {
  EXPECT_EQ(summary({}, false), "no errors, no warnings\n");
  const Group warnings{
      "w", {{.name = "a", .status = Status::warning}, {.name = "b", .status = Status::warning}}};
  EXPECT_EQ(summary({kGroup, warnings}, false), "1 error, 2 warnings\n");
}

TEST(DoctorJson, HasTheDocumentedFields) {
  Group group = kGroup;
  group.checks[1].values = {{"number", 3}, {"bytes", "\xff"}};
  const auto document = nlohmann::json::parse(json_of({group}));
  EXPECT_EQ(document["status"], "error");
  EXPECT_EQ(document["groups"][0]["id"], "some_group");
  const auto& checks = document["groups"][0]["checks"];
  ASSERT_EQ(checks.size(), 4u);
  EXPECT_EQ(checks[1], nlohmann::json::parse(R"({"id": "some_group.with_text", "status": "ok",
            "text": "fine", "advice": "", "values": {"number": 3, "bytes": "\ufffd"}})"));
  EXPECT_EQ(checks[3]["advice"], "do this");
  EXPECT_EQ(nlohmann::json::parse(json_of({}))["status"], "ok");
}

}  // namespace
}  // namespace paceline::doctor
