#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/membership/failure.h"

namespace paceline::shm {

// What ranks and rank 0 send each other while they form a group. Decoding gives nothing for a
// malformed packet.

inline constexpr OpContext kConnecting{"connect", 0};
inline constexpr std::uint32_t kProtocol = 16;

// A rank's first packet; its pipe's read end travels with it. If the rank cannot join, the reason
// follows instead.
struct Hello {
  std::uint32_t protocol = kProtocol;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::uint64_t agreed_bytes = 0;  // see GroupMemory
  std::uint64_t group = 0;         // see join
};
std::string encode(const Hello& hello, const std::string& reason = "");
std::optional<Hello> decode_hello(const std::string& bytes);  // without a reason
// What follows a hello: empty unless the rank cannot join.
std::string decode_reason(const std::string& bytes);

// Rank 0's answer; the memory and the watches travel with it.
struct Welcome {
  std::vector<pid_t> pids;    // by rank
  std::string pid_namespace;  // in which the ranks have these numbers
};
std::string encode(const Welcome& welcome);
std::optional<Welcome> decode_welcome(const std::string& bytes, int size);

// Its other answer.
std::string encode(const Failure& failure);
std::optional<Failure> decode_failure(const std::string& bytes);

// The failure if a rank is lost meanwhile.
Failure lost_on_the_way(int rank, const GlobalRanks& global_ranks, const std::string& why = "");

}  // namespace paceline::shm
