#include "internode/link_messages.h"

#include <array>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace paceline::internode {
namespace {

class Writer {
 public:
  template <typename Integer>
  void add(Integer value) {
    const auto bits = static_cast<std::make_unsigned_t<Integer>>(value);
    for (std::size_t byte = 0; byte < sizeof(Integer); ++byte) {
      text_ += static_cast<char>(bits >> (8 * byte));
    }
  }
  void add(const std::string& text) {
    add(static_cast<std::uint32_t>(text.size()));
    text_ += text;
  }
  void add(const shm::RankSet& ranks) {
    for (const std::uint64_t word : ranks.words()) add(word);
  }
  void add(const Topic& topic) {
    add(topic.stream);
    add(topic.number);
  }

  void add(const Hello& hello) {
    add(hello.version);
    add(hello.group);
    add(hello.node);
  }
  void add(const Share& share) {
    add(share.topic);
    add(share.text);
  }
  void add(const Question& question) { add(question.topic); }
  void add(const Answer& answer) {
    add(answer.topic);
    add(answer.late);
  }
  void add(const Failed& failed) {
    add(static_cast<std::uint32_t>(failed.failure.kind));
    add(failed.failure.ranks);
    add(failed.failure.text);
  }
  void add(const Left& left) { add(left.ranks); }
  void add(const Aborted& aborted) {
    add(aborted.step);
    add(aborted.at_fault);
    add(aborted.gone);
  }
  void add(const Waits& waits) {
    add(waits.rank);
    add(waits.awaited);
  }

  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  // Everything was read, and nothing was missing.
  bool complete() const { return valid_ && text_.empty(); }

  template <typename Integer>
  requires std::is_integral_v<Integer>
  void read(Integer& value) {
    std::make_unsigned_t<Integer> bits = 0;
    const std::string_view bytes = take(sizeof(Integer));
    for (std::size_t byte = 0; byte < bytes.size(); ++byte) {
      bits |= static_cast<decltype(bits)>(static_cast<unsigned char>(bytes[byte])) << (8 * byte);
    }
    value = static_cast<Integer>(bits);
  }
  void read(std::string& text) {
    std::uint32_t size = 0;
    read(size);
    text = take(size);
  }
  void read(shm::RankSet& ranks) {
    shm::RankSet::Words words{};
    for (std::uint64_t& word : words) read(word);
    ranks = shm::RankSet(words);
  }
  void read(Topic& topic) {
    read(topic.stream);
    read(topic.number);
  }

  void read(Hello& hello) {
    read(hello.version);
    read(hello.group);
    read(hello.node);
  }
  void read(Share& share) {
    read(share.topic);
    read(share.text);
  }
  void read(Question& question) { read(question.topic); }
  void read(Answer& answer) {
    read(answer.topic);
    read(answer.late);
  }
  void read(Failed& failed) {
    std::uint32_t kind = 0;
    read(kind);
    read(failed.failure.ranks);
    read(failed.failure.text);
    failed.failure.kind = static_cast<shm::FailureKind>(kind);
    valid_ = valid_ && kind > 0 && kind <= static_cast<std::uint32_t>(shm::FailureKind::mismatch);
  }
  void read(Left& left) { read(left.ranks); }
  void read(Aborted& aborted) {
    read(aborted.step);
    read(aborted.at_fault);
    read(aborted.gone);
  }
  void read(Waits& waits) {
    read(waits.rank);
    read(waits.awaited);
  }

 private:
  std::string_view take(std::size_t size) {
    if (size > text_.size()) valid_ = false;
    if (!valid_) return {};
    const std::string_view taken = text_.substr(0, size);
    text_.remove_prefix(size);
    return taken;
  }

  std::string_view text_;
  bool valid_ = true;
};

template <std::size_t... Types>
std::optional<LinkMessage> decode_one_of(std::uint8_t type, Reader& reader,
                                         std::index_sequence<Types...>) {
  std::optional<LinkMessage> message;
  const auto decode_if = [&]<std::size_t Type>(std::integral_constant<std::size_t, Type>) {
    if (type == Type) reader.read(message.emplace().emplace<Type>());
  };
  (decode_if(std::integral_constant<std::size_t, Types>()), ...);
  return reader.complete() ? message : std::nullopt;
}

}  // namespace

std::string encode(const LinkMessage& message) {
  Writer writer;
  writer.add(static_cast<std::uint8_t>(message.index()));
  std::visit([&](const auto& one) { writer.add(one); }, message);
  return writer.take();
}

std::optional<LinkMessage> decode_link_message(std::string_view text) {
  Reader reader(text);
  std::uint8_t type = 0;
  reader.read(type);
  return decode_one_of(type, reader, std::make_index_sequence<std::variant_size_v<LinkMessage>>());
}

}  // namespace paceline::internode
