#include "shm/membership/bootstrap_packets.h"

#include <fmt/format.h>

#include <cstring>

namespace paceline::shm {
namespace {

constexpr char kWelcome = 'W';
constexpr char kFailure = 'F';

template <typename T>
std::string to_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

// The T at offset `at`; `bytes` must be long enough.
template <typename T>
T read(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

}  // namespace

std::string encode(const Hello& hello, const std::string& reason) {
  return to_bytes(hello) + reason.substr(0, FailureRecord::kMaxText);
}

std::optional<Hello> decode_hello(const std::string& bytes) {
  if (bytes.size() != sizeof(Hello)) return std::nullopt;
  return read<Hello>(bytes, 0);
}

std::string decode_reason(const std::string& bytes) {
  return bytes.size() > sizeof(Hello) ? bytes.substr(sizeof(Hello)) : "";
}

std::string encode(const Welcome& welcome) {
  std::string bytes(1, kWelcome);
  for (const pid_t pid : welcome.pids) bytes += to_bytes(pid);
  return bytes + welcome.pid_namespace;
}

std::optional<Welcome> decode_welcome(const std::string& bytes, int size) {
  const auto count = static_cast<std::size_t>(size);
  const std::size_t end = 1 + count * sizeof(pid_t);
  if (bytes.size() < end || bytes.front() != kWelcome) return std::nullopt;
  Welcome welcome{{}, bytes.substr(end)};
  for (std::size_t i = 0; i < count; ++i) {
    welcome.pids.push_back(read<pid_t>(bytes, 1 + i * sizeof(pid_t)));
  }
  return welcome;
}

std::string encode(const Failure& failure) {
  std::string bytes(1, kFailure);
  bytes.append(to_bytes(failure.kind)).append(to_bytes(failure.ranks.words())).append(failure.text);
  return bytes;
}

std::optional<Failure> decode_failure(const std::string& bytes) {
  constexpr std::size_t kRanks = 1 + sizeof(FailureKind);
  constexpr std::size_t kText = kRanks + sizeof(RankSet::Words);
  if (bytes.size() < kText || bytes.front() != kFailure) return std::nullopt;
  return Failure{read<FailureKind>(bytes, 1), RankSet(read<RankSet::Words>(bytes, kRanks)),
                 bytes.substr(kText)};
}

Failure lost_on_the_way(int rank, const GlobalRanks& global_ranks, const std::string& why) {
  return {FailureKind::peer_lost,
          {global_ranks.of(rank)},
          fmt::format("rank {} was lost while the group was being formed{}", global_ranks.of(rank),
                      why)};
}

}  // namespace paceline::shm
