#include "net/secure_channel.h"

#include <fmt/format.h>
#include <sodium.h>

#include <utility>

namespace paceline::net {
namespace {

constexpr std::string_view kMagic = "paceline channel 1\n";
constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kTagBytes = crypto_aead_chacha20poly1305_IETF_ABYTES;

using Nonce = std::array<unsigned char, crypto_aead_chacha20poly1305_IETF_NPUBBYTES>;

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

unsigned char* bytes_of(std::string& text) {
  return reinterpret_cast<unsigned char*>(text.data());
}

Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  for (std::size_t i = 0; i < sizeof(number); ++i) {
    nonce[i] = static_cast<unsigned char>(number >> (8 * i));
  }
  return nonce;
}

std::string encode_length(std::size_t length) {
  std::string bytes;
  for (std::size_t i = 0; i < kLengthBytes; ++i) bytes += static_cast<char>(length >> (8 * i));
  return bytes;
}

std::size_t decode_length(std::string_view bytes) {
  std::size_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::size_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return length;
}

// The key of the direction from the connecting side or to it.
template <typename Random>
Key direction_key(const Key& key, SecureChannel::Side sender, const Random& connecting,
                  const Random& accepting) {
  const unsigned char direction = sender == SecureChannel::Side::connecting ? 'c' : 'a';
  crypto_generichash_state state;
  Key result;
  crypto_generichash_init(&state, key.bytes.data(), key.bytes.size(), result.bytes.size());
  crypto_generichash_update(&state, &direction, 1);
  crypto_generichash_update(&state, connecting.data(), connecting.size());
  crypto_generichash_update(&state, accepting.data(), accepting.size());
  crypto_generichash_final(&state, result.bytes.data(), result.bytes.size());
  return result;
}

void start_sodium() {
  if (::sodium_init() < 0) throw Error("libsodium cannot be used on this machine");
}

}  // namespace

std::string make_secret() {
  start_sodium();
  std::array<unsigned char, sizeof(Key)> bytes;
  ::randombytes_buf(bytes.data(), bytes.size());
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

Key make_key(std::string_view secret) {
  start_sodium();
  Key key;
  crypto_generichash(key.bytes.data(), key.bytes.size(), bytes_of(secret), secret.size(), nullptr,
                     0);
  return key;
}

SecureChannel::SecureChannel(const Key& key, Side side) : key_(key), side_(side) {
  ::randombytes_buf(own_random_.data(), own_random_.size());
  if (side == Side::connecting) {
    output_ = kMagic;
    greet();
  }
}

void SecureChannel::greet() {
  output_.append(reinterpret_cast<const char*>(own_random_.data()), own_random_.size());
}

void SecureChannel::send(std::string_view message) {
  if (message.size() > kMaxMessage) {
    throw UsageError(
        fmt::format("a message of {} bytes; at most {} are allowed", message.size(), kMaxMessage));
  }
  waiting_.emplace_back(message);
  seal_waiting();
}

std::string SecureChannel::take_output() {
  return std::exchange(output_, {});
}

std::vector<std::string> SecureChannel::receive(std::string_view bytes) {
  input_ += bytes;
  std::vector<std::string> messages;
  if (!has_keys_ && !take_greeting()) return messages;
  while (open_one(messages)) {
  }
  seal_waiting();
  return messages;
}

// False if it is not complete yet.
bool SecureChannel::take_greeting() {
  std::string_view greeting = input_;
  if (side_ == Side::accepting) {
    const std::string_view magic = greeting.substr(0, kMagic.size());
    if (magic != kMagic.substr(0, magic.size())) {
      throw ChannelError("it is no process of Paceline");
    }
    greeting.remove_prefix(magic.size());
  }
  Random other{};
  if (greeting.size() < other.size()) return false;
  std::copy_n(greeting.begin(), other.size(), other.begin());
  input_.erase(0, input_.size() - greeting.size() + other.size());

  if (side_ == Side::accepting) greet();
  const bool connects = side_ == Side::connecting;
  const Side other_side = connects ? Side::accepting : Side::connecting;
  const Random& connecting = connects ? own_random_ : other;
  const Random& accepting = connects ? other : own_random_;
  sending_key_ = direction_key(key_, side_, connecting, accepting);
  receiving_key_ = direction_key(key_, other_side, connecting, accepting);
  has_keys_ = true;
  seal_waiting();
  return true;
}

void SecureChannel::seal_waiting() {
  if (!has_keys_ || (side_ == Side::accepting && !authenticated())) return;
  for (const std::string& message : std::exchange(waiting_, {})) {
    const std::string length = encode_length(message.size());
    std::string sealed(message.size() + kTagBytes, '\0');
    crypto_aead_chacha20poly1305_ietf_encrypt(
        bytes_of(sealed), nullptr, bytes_of(message), message.size(), bytes_of(length),
        length.size(), nullptr, nonce_of(sealed_++).data(), sending_key_.bytes.data());
    output_ += length + sealed;
  }
}

// False if no message is complete.
bool SecureChannel::open_one(std::vector<std::string>& messages) {
  if (input_.size() < kLengthBytes) return false;
  const std::string_view length = std::string_view(input_).substr(0, kLengthBytes);
  const std::size_t size = decode_length(length);
  if (size > (authenticated() ? kMaxMessage : kMaxFirstMessage)) {
    throw ChannelError("it sent what no process of Paceline sends");
  }
  if (input_.size() < kLengthBytes + size + kTagBytes) return false;
  const std::string_view sealed = std::string_view(input_).substr(kLengthBytes, size + kTagBytes);
  std::string message(size, '\0');
  const int error = crypto_aead_chacha20poly1305_ietf_decrypt(
      bytes_of(message), nullptr, nullptr, bytes_of(sealed), sealed.size(), bytes_of(length),
      length.size(), nonce_of(opened_).data(), receiving_key_.bytes.data());
  if (error != 0) throw WrongKeyError("it does not know the secret of this job");
  ++opened_;
  input_.erase(0, kLengthBytes + size + kTagBytes);
  messages.push_back(std::move(message));
  return true;
}

}  // namespace paceline::net
