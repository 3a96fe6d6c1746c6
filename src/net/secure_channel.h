#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/error.h>

namespace paceline::net {

// What both ends of a channel know. Made of a secret text of any length.
struct Key {
  std::array<unsigned char, 32> bytes{};
};

// Throws Error if the cryptographic library does not work on this machine.
Key make_key(std::string_view secret);
// Random, of printable characters; nobody can guess it. Throws as make_key does.
std::string make_secret();

// The other end does not follow the protocol.
class ChannelError : public Error {
 public:
  using Error::Error;
};

// The other end does not know the key.
class WrongKeyError : public ChannelError {
 public:
  using ChannelError::ChannelError;
};

// One end of a stream that carries messages, encrypted and authenticated with a key that is new for
// each stream. Makes bytes to send of messages and messages of bytes; it has no socket.
//
// The connecting side begins with a magic number and 32 random bytes; the accepting side answers
// with 32 of its own. Each direction then has a key: BLAKE2b, keyed with the secret's, of the
// direction and both sides' bytes. A message is its length in 4 bytes, least significant first, and
// its text, sealed with ChaCha20-Poly1305 (RFC 8439), whose nonce is the number of the message.
//
// The accepting side seals nothing before it has opened a message, so that a client without the
// secret gets 32 random bytes and nothing to guess it by. An attacker who poses as the accepting
// side, or listens in, can try secrets on what it has: they have to be random.
class SecureChannel {
 public:
  enum class Side { connecting, accepting };

  static constexpr std::size_t kMaxMessage = std::size_t{16} << 20;
  static constexpr std::size_t kMaxFirstMessage = std::size_t{64} << 10;

  SecureChannel(const Key& key, Side side);

  // The other end's random bytes have come.
  bool greeted() const { return has_keys_; }
  // The other end has proved that it knows the key: one of its messages was opened.
  bool authenticated() const { return opened_ > 0; }

  // Throws UsageError for a message that is too long.
  void send(std::string_view message);
  // The messages that `bytes` complete. Throws ChannelError; the channel is of no use then.
  std::vector<std::string> receive(std::string_view bytes);
  // The bytes that have to go to the other end now.
  std::string take_output();

 private:
  using Random = std::array<unsigned char, 32>;

  void greet();
  bool take_greeting();
  bool open_one(std::vector<std::string>& messages);
  void seal_waiting();

  Key key_;
  Side side_;
  Random own_random_;
  Key sending_key_;
  Key receiving_key_;
  bool has_keys_ = false;
  std::uint64_t sealed_ = 0;
  std::uint64_t opened_ = 0;
  std::vector<std::string> waiting_;  // for the keys, or for the first message of the other end
  std::string input_;
  std::string output_;
};

}  // namespace paceline::net
