#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>

#include "shm/membership/failure.h"
#include "shm/membership/rank_set.h"

namespace paceline::internode {

// What the leaders of a group's nodes say to each other. A message is a byte for its type and the
// fields, integers least significant byte first.

// The first message on a connection.
struct Hello {
  std::string version;  // of Paceline; has to be the same
  std::string group;
  std::int32_t node = 0;
};

// What a gather collects, on all nodes.
struct Topic {
  std::uint32_t stream = 0;
  std::uint64_t number = 0;  // in the stream

  bool operator==(const Topic&) const = default;
  bool operator<(const Topic& other) const {
    return std::tie(stream, number) < std::tie(other.stream, other.number);
  }
};

// A node's share of a gather.
struct Share {
  Topic topic;
  std::string text;
};

// Waits for the share of the receiving node.
struct Question {
  Topic topic;
};

// The answer: the global ranks that the share waits for.
struct Answer {
  Topic topic;
  shm::RankSet late;
};

// The failure of the group, as the node has it.
struct Failed {
  shm::Failure failure;
};

// Ranks of the node, as global ranks, that have left the group: all so far.
struct Left {
  shm::RankSet ranks;
};

// The node has aborted a step of a bucket reducer.
struct Aborted {
  Topic step;
  shm::RankSet at_fault;  // global, none if unknown
  std::uint8_t gone = 0;  // 1: as in SecondLevel::abort
};

// A rank of the node waits for a message to or from another rank. Both are global ranks.
struct Waits {
  std::int32_t rank = 0;
  std::int32_t awaited = -1;  // -1: none
};

using LinkMessage = std::variant<Hello, Share, Question, Answer, Failed, Left, Aborted, Waits>;

std::string encode(const LinkMessage& message);
// nullopt for text that no encode() makes.
std::optional<LinkMessage> decode_link_message(std::string_view text);

}  // namespace paceline::internode
