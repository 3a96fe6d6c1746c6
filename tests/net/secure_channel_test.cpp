#include "net/secure_channel.h"

#include <gmock/gmock.h>

namespace paceline::net {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Side = SecureChannel::Side;

const Key kKey = make_key("a secret of a job");

struct Ends {
  SecureChannel connecting{kKey, Side::connecting};
  SecureChannel accepting{kKey, Side::accepting};

  // Carries bytes both ways until none are left, and returns what arrives at each end.
  std::pair<std::vector<std::string>, std::vector<std::string>> exchange(
      std::size_t piece = 1 << 20) {
    std::pair<std::vector<std::string>, std::vector<std::string>> arrived;
    const auto carry = [&](SecureChannel& from, SecureChannel& to, std::vector<std::string>& into) {
      const std::string bytes = from.take_output();
      for (std::size_t at = 0; at < bytes.size(); at += piece) {
        for (std::string& message : to.receive(bytes.substr(at, piece))) into.push_back(message);
      }
      return !bytes.empty();
    };
    for (bool moves = true; moves;) {
      moves = carry(connecting, accepting, arrived.second);
      moves = carry(accepting, connecting, arrived.first) || moves;
    }
    return arrived;
  }
};

std::string failure(const std::function<void()>& body) {
  try {
    body();
  } catch (const ChannelError& error) {
    return error.what();
  }
  return "none";
}

TEST(SecureChannel, CarriesMessagesBothWays) {
  for (const std::size_t piece : {1, 7, 1 << 20}) {
    Ends ends;
    ends.accepting.send("answer");
    ends.connecting.send("question");
    ends.connecting.send("");
    const auto [to_connecting, to_accepting] = ends.exchange(piece);
    EXPECT_THAT(to_accepting, ElementsAre("question", ""));
    EXPECT_THAT(to_connecting, ElementsAre("answer"));
    EXPECT_TRUE(ends.connecting.authenticated());
    EXPECT_TRUE(ends.accepting.authenticated());
    ends.connecting.send(std::string(SecureChannel::kMaxMessage, 'x'));
    EXPECT_THAT(ends.exchange().second, ElementsAre(std::string(SecureChannel::kMaxMessage, 'x')));
  }
}

TEST(SecureChannel, RefusesAMessageThatIsTooLong) {
  Ends ends;
  EXPECT_THROW(ends.connecting.send(std::string(SecureChannel::kMaxMessage + 1, 'x')), UsageError);
}

// What is sent is neither the text nor the same in two streams.
TEST(SecureChannel, HidesMessages) {
  std::vector<std::string> sent;
  for (int i = 0; i < 2; ++i) {
    Ends ends;
    ends.exchange();
    ends.connecting.send("the same text, sent twice");
    sent.push_back(ends.connecting.take_output());
  }
  EXPECT_NE(sent[0], sent[1]);
  EXPECT_THAT(sent[0], Not(HasSubstr("text")));
}

TEST(SecureChannel, TellsAStrangerNothing) {
  SecureChannel stranger(make_key("another secret of a job"), Side::connecting);
  SecureChannel accepting(kKey, Side::accepting);
  accepting.send("for those who know the secret");
  EXPECT_THAT(accepting.take_output(), IsEmpty());
  EXPECT_THAT(accepting.receive(stranger.take_output()), IsEmpty());
  const std::string answer = accepting.take_output();
  EXPECT_EQ(answer.size(), 32U);
  stranger.receive(answer);
  stranger.send("let me in");
  EXPECT_THAT(failure([&] { accepting.receive(stranger.take_output()); }),
              HasSubstr("does not know the secret"));
  EXPECT_THAT(accepting.take_output(), IsEmpty());
  EXPECT_FALSE(accepting.authenticated());
}

TEST(SecureChannel, RefusesOtherProtocols) {
  SecureChannel accepting(kKey, Side::accepting);
  EXPECT_THAT(failure([&] { accepting.receive("GET / HTTP/1.1\r\n"); }),
              HasSubstr("no process of Paceline"));
}

TEST(SecureChannel, RefusesAChangedARepeatedAndALongMessage) {
  Ends changed;
  changed.exchange();
  changed.connecting.send("ten thousand");
  std::string bytes = changed.connecting.take_output();
  bytes[6] = static_cast<char>(bytes[6] ^ 1);
  EXPECT_NE(failure([&] { changed.accepting.receive(bytes); }), "none");

  Ends repeated;
  repeated.exchange();
  repeated.connecting.send("once");
  bytes = repeated.connecting.take_output();
  EXPECT_THAT(repeated.accepting.receive(bytes), ElementsAre("once"));
  EXPECT_NE(failure([&] { repeated.accepting.receive(bytes); }), "none");

  // 1 MiB is announced before anything is proved: it is not waited for.
  Ends lengthy;
  lengthy.exchange();
  EXPECT_NE(failure([&] { lengthy.accepting.receive(std::string("\0\0\x10\0", 4)); }), "none");
}

}  // namespace
}  // namespace paceline::net
