#include "internode/link_messages.h"

#include <gmock/gmock.h>

#include <string>
#include <variant>

namespace paceline::internode {
namespace {

template <typename Kind>
Kind after_a_journey(const Kind& message) {
  const auto decoded = decode_link_message(encode(message));
  EXPECT_TRUE(decoded && std::holds_alternative<Kind>(*decoded));
  return std::get<Kind>(*decoded);
}

TEST(LinkMessages, ArriveAsTheyWereSent) {
  const Hello hello = after_a_journey(Hello{"1.2", "world", -3});
  EXPECT_EQ(hello.version, "1.2");
  EXPECT_EQ(hello.group, "world");
  EXPECT_EQ(hello.node, -3);
  const Topic topic{7, std::uint64_t{1} << 40};
  const Share share = after_a_journey(Share{topic, std::string("a\0b", 3)});
  EXPECT_EQ(share.topic, topic);
  EXPECT_EQ(share.text, std::string("a\0b", 3));
  EXPECT_EQ(after_a_journey(Question{topic}).topic, topic);
  const Answer answer = after_a_journey(Answer{topic, {0, 63, 1023}});
  EXPECT_EQ(answer.topic, topic);
  EXPECT_EQ(answer.late, shm::RankSet({0, 63, 1023}));
  const Failed failed = after_a_journey(Failed{{shm::FailureKind::timeout, {5}, "why"}});
  EXPECT_EQ(failed.failure.kind, shm::FailureKind::timeout);
  EXPECT_EQ(failed.failure.ranks, shm::RankSet({5}));
  EXPECT_EQ(failed.failure.text, "why");
  EXPECT_EQ(after_a_journey(Left{{1, 2}}).ranks, shm::RankSet({1, 2}));
  const Aborted aborted = after_a_journey(Aborted{topic, {7}});
  EXPECT_EQ(aborted.step, topic);
  EXPECT_EQ(aborted.at_fault, shm::RankSet({7}));
  const Waits waits = after_a_journey(Waits{1023, -1});
  EXPECT_EQ(waits.rank, 1023);
  EXPECT_EQ(waits.awaited, -1);
}

TEST(LinkMessages, OfOtherBytesAreNone) {
  const LinkMessage messages[] = {Hello{"1", "world", 1},
                                  Share{{}, "text"},
                                  Failed{{shm::FailureKind::peer_lost, {1}, "why"}},
                                  Left{{1}},
                                  Aborted{{}, {1}},
                                  Waits{1, 2}};
  for (const LinkMessage& message : messages) {
    const std::string text = encode(message);
    for (std::size_t size = 0; size < text.size(); ++size) {
      EXPECT_FALSE(decode_link_message(text.substr(0, size)));
    }
    EXPECT_FALSE(decode_link_message(text + "x"));
  }
  EXPECT_FALSE(decode_link_message("\x08"));
  std::string wrong_kind = encode(Failed{{shm::FailureKind::mismatch, {}, ""}});
  for (const char kind : {'\0', '\4'}) {
    wrong_kind[1] = kind;
    EXPECT_FALSE(decode_link_message(wrong_kind));
  }
}

}  // namespace
}  // namespace paceline::internode
