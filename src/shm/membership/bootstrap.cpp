#include "shm/membership/bootstrap.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <paceline/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/errno_error.h"
#include "base/pipe.h"
#include "shm/membership/failure.h"
#include "shm/membership/socket.h"
#include "shm/memory/mapping.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {
namespace {

constexpr OpContext kConnecting{"connect", 0};
constexpr std::uint32_t kProtocol = 4;

// A rank's first packet; its pipe's read end travels with it.
struct Hello {
  std::uint32_t protocol;
  std::int32_t rank;
  std::int32_t size;
  std::uint64_t memory_bytes;
};

template <typename T>
std::string to_bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

template <typename T>
std::optional<T> from_bytes(const std::string& bytes) {
  T value;
  if (bytes.size() != sizeof(T)) return std::nullopt;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

std::string encode(const Failure& failure) {
  std::string bytes("F");
  bytes.append(to_bytes(failure.kind)).append(to_bytes(failure.ranks.words())).append(failure.text);
  return bytes;
}

// Whether something can be read, or the other end is gone.
bool has_news(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) > 0;
}

base::UniqueFd open_pidfd(pid_t pid) {
  if (pid <= 0) return {};
  return base::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

Failure lost(int rank, const GlobalRanks& numbers, const std::string& why = "") {
  return {
      FailureKind::peer_lost,
      {numbers.of(rank)},
      fmt::format("rank {} was lost while the group was being formed{}", numbers.of(rank), why)};
}

// Rank 0's side. Sockets may be known to lead to a rank from the start (inherited) or only
// once their hello has come (accepted).
class Coordinator {
 public:
  Coordinator(int size, std::size_t memory_bytes, const base::Deadline& deadline,
              const GlobalRanks& numbers)
      : size_(size),
        memory_bytes_(memory_bytes),
        deadline_(deadline),
        numbers_(numbers),
        peers_(size),
        greeted_(size) {
    greeted_[0] = true;
  }

  void add_link(base::UniqueFd socket, std::optional<int> rank) {
    want_credentials(socket.get());
    links_.push_back({std::move(socket), rank});
  }
  void accept_at(base::UniqueFd listener) { listener_ = std::move(listener); }
  // Watches a rank that has not connected yet.
  void expect(int rank, pid_t pid) {
    base::UniqueFd watch = open_pidfd(pid);
    if (!watch && pid > 0 && errno == ESRCH) ended_ = rank;
    expected_.push_back({std::move(watch), rank});
  }

  Membership run() {
    std::optional<Failure> failure;
    if (ended_) failure = lost(*ended_, numbers_);
    try {
      while (!failure && std::count(greeted_.begin(), greeted_.end(), false) > 0) {
        failure = gather_some();
      }
      if (!failure) return welcome();
      if (failure->kind != FailureKind::timeout) admit_latecomers();
    } catch (const std::exception& error) {
      tell_all(encode(lost(0, numbers_, fmt::format(": {}", error.what()))), {});
      throw;
    }
    tell_all(encode(*failure), {});
    throw_failure(*failure, kConnecting);
  }

 private:
  struct Link {
    base::UniqueFd socket;
    std::optional<int> rank;
  };

  std::optional<Failure> gather_some() {
    std::vector<int> fds{listener_.get()};
    for (const Link& link : links_) fds.push_back(link.socket.get());
    for (const Link& one : expected_) fds.push_back(greeted_[*one.rank] ? -1 : one.socket.get());
    const auto ready = wait_readable(fds, deadline_);
    if (std::find(ready.begin(), ready.end(), true) == ready.end()) return too_late();

    const std::size_t links = links_.size();
    for (std::size_t i = 0; i < links; ++i) {
      if (!ready[1 + i]) continue;
      if (auto failure = receive_hello(links_[i])) return failure;
    }
    if (ready[0]) {
      if (auto socket = accept_from_same_user(listener_.get())) {
        add_link(std::move(socket), std::nullopt);
        return std::nullopt;  // what it sent before it ended, if it did, comes first
      }
    }
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      if (ready[1 + links + i] && !greeted_[*expected_[i].rank] && !ready[0]) {
        return lost(*expected_[i].rank, numbers_);
      }
    }
    return std::nullopt;
  }

  std::optional<Failure> receive_hello(Link& link) {
    Packet packet = receive_packet(link.socket.get(), sizeof(Hello) + 1);
    if (packet.closed) {
      link.socket.reset();
      return link.rank ? std::optional(gone(*link.rank)) : std::nullopt;
    }
    const auto hello = from_bytes<Hello>(packet.bytes);
    if (!hello || packet.fds.size() != 1 || hello->protocol != kProtocol || hello->rank < 1 ||
        hello->rank >= size_ || greeted_[hello->rank] ||
        link.rank.value_or(hello->rank) != hello->rank) {
      return Failure{
          FailureKind::mismatch, link.rank ? RankSet{numbers_.of(*link.rank)} : RankSet(),
          "a process that wants to join the group speaks another version of Paceline, or "
          "two ranks have the same number"};
    }
    if (hello->size != size_ || hello->memory_bytes != memory_bytes_) {
      return Failure{
          FailureKind::mismatch,
          {numbers_.of(hello->rank)},
          fmt::format("rank {} forms a group of {} ranks with {} bytes of shared memory, "
                      "rank {} one of {} ranks with {} bytes",
                      numbers_.of(0), size_, memory_bytes_, numbers_.of(hello->rank), hello->size,
                      hello->memory_bytes)};
    }
    link.rank = hello->rank;
    greeted_[hello->rank] = true;
    base::UniqueFd pidfd = open_pidfd(packet.pid);
    peers_[hello->rank] = {pidfd ? std::move(pidfd) : std::move(packet.fds.front()), packet.pid};
    return std::nullopt;
  }

  // Those that are on their way are to find somebody who tells them.
  void admit_latecomers() {
    const auto deadline = base::Deadline::after(kVerdict);
    const auto alive = [](const Link& one) { return one.socket && !has_news(one.socket.get()); };
    const auto open = [](const Link& one) { return static_cast<bool>(one.socket); };
    while (listener_ &&
           std::ranges::count_if(expected_, alive) > std::ranges::count_if(links_, open)) {
      if (!wait_readable(listener_.get(), deadline)) return;
      if (auto socket = accept_from_same_user(listener_.get())) {
        add_link(std::move(socket), std::nullopt);
      }
    }
  }

  // What it means that a rank closed its link.
  Failure gone(int rank) const {
    if (!greeted_[rank]) return lost(rank, numbers_);
    // A process closes its files before it counts as ended.
    const int watch = peers_[rank].watch.get();
    if (wait_readable(watch, base::Deadline::after(kVerdict))) return lost(rank, numbers_);
    return missing(fmt::format("before rank {} gave up waiting", numbers_.of(rank)));
  }

  Failure too_late() const {
    return missing(fmt::format("within the timeout of {} s", deadline_.budget().count() / 1000.0));
  }

  Failure missing(const std::string& when) const {
    RankSet ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (!greeted_[rank]) ranks.insert(numbers_.of(rank));
    }
    return {FailureKind::timeout, ranks,
            fmt::format("{} did not join the group {}", describe_ranks(ranks), when)};
  }

  void tell_all(const std::string& bytes, const std::vector<int>& fds) {
    fault_point();
    for (const Link& link : links_) {
      // One that is gone now is found out by whoever waits for it next.
      if (link.socket) send_packet(link.socket.get(), bytes, fds, deadline_);
    }
  }

  Membership welcome() {
    Membership result;
    base::Pipe own = base::make_pipe();
    base::UniqueFd pidfd = open_pidfd(::getpid());
    peers_[0] = {pidfd ? std::move(pidfd) : std::move(own.read_end), ::getpid()};
    result.own_liveness = std::move(own.write_end);
    result.memory = Mapping::create_memory(memory_bytes_);

    std::string bytes = "W";
    std::vector<int> fds{result.memory.get()};
    for (const Peer& peer : peers_) {
      bytes += to_bytes(peer.pid);
      fds.push_back(peer.watch.get());
    }
    tell_all(bytes, fds);
    peers_[0].watch.reset();
    result.peers = std::move(peers_);
    return result;
  }

  int size_;
  std::size_t memory_bytes_;
  base::Deadline deadline_;
  const GlobalRanks& numbers_;
  base::UniqueFd listener_;
  std::vector<Link> links_;
  std::vector<Link> expected_;
  std::optional<int> ended_;  // of those expected: one of which nothing is left to watch
  std::vector<Peer> peers_;
  std::vector<bool> greeted_;
};

Membership join_as_member(base::UniqueFd link, int rank, int size, std::size_t memory_bytes,
                          const base::Deadline& deadline, const GlobalRanks& numbers) {
  base::Pipe own = base::make_pipe();
  const std::array<int, 1> mine{own.read_end.get()};
  const Hello hello{kProtocol, rank, size, memory_bytes};
  fault_point();
  // If rank 0 is gone, the wait below says so.
  send_packet(link.get(), to_bytes(hello), mine, deadline);
  own.read_end.reset();

  if (!wait_readable(link.get(), base::Deadline::after(deadline.remaining() + kVerdict))) {
    throw_failure({FailureKind::timeout,
                   {numbers.of(0)},
                   fmt::format("rank {} did not form the group within the timeout of {} s",
                               numbers.of(0), deadline.budget().count() / 1000.0)},
                  kConnecting);
  }
  Packet packet = receive_packet(link.get(), 2 * FailureRecord::kMaxText);
  if (packet.closed) throw_failure(lost(0, numbers), kConnecting);

  constexpr std::size_t kFailureHead = 1 + sizeof(FailureKind) + sizeof(RankSet::Words);
  if (packet.bytes.front() == 'F' && packet.bytes.size() >= kFailureHead) {
    Failure failure;
    std::memcpy(&failure.kind, packet.bytes.data() + 1, sizeof(failure.kind));
    RankSet::Words ranks{};
    std::memcpy(&ranks, packet.bytes.data() + 1 + sizeof(failure.kind), sizeof(ranks));
    failure.ranks = RankSet(ranks);
    failure.text = packet.bytes.substr(kFailureHead);
    throw_failure(failure, kConnecting);
  }
  const auto count = static_cast<std::size_t>(size);
  if (packet.bytes.size() != 1 + count * sizeof(pid_t) || packet.fds.size() != 1 + count) {
    throw_failure({FailureKind::mismatch,
                   {numbers.of(0)},
                   fmt::format("rank {} speaks another version of Paceline", numbers.of(0))},
                  kConnecting);
  }
  Membership result;
  result.memory = std::move(packet.fds.front());
  result.own_liveness = std::move(own.write_end);
  for (std::size_t i = 0; i < count; ++i) {
    Peer peer;
    if (static_cast<int>(i) != rank) peer.watch = std::move(packet.fds[1 + i]);
    std::memcpy(&peer.pid, packet.bytes.data() + 1 + i * sizeof(pid_t), sizeof(pid_t));
    result.peers.push_back(std::move(peer));
  }
  return result;
}

std::string name_of_namespace(const char* which) {
  std::array<char, 64> name{};
  const ssize_t length = ::readlink(which, name.data(), name.size());
  return {name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

// What two processes must share to meet at an abstract socket.
std::string machine_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + " " + name_of_namespace("/proc/self/ns/net");
}

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw base::errno_error("cannot get random bytes");
  }
  std::string name = "paceline-";
  for (const unsigned char byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

// What a rank tells the others through the Exchange.
struct Endpoint {
  pid_t pid;
  std::string pids;  // the namespace in which it has that number
  std::string machine;
  std::string socket;

  std::string encode() const { return fmt::format("{}\n{}\n{}\n{}", pid, pids, machine, socket); }
  static Endpoint decode(const std::string& text) {
    std::array<std::string, 4> lines;
    std::istringstream stream(text);
    for (std::string& line : lines) std::getline(stream, line);
    if (lines[2].empty()) throw Error("a rank sent something else than its address");
    return {static_cast<pid_t>(std::strtol(lines[0].c_str(), nullptr, 10)), lines[1], lines[2],
            lines[3]};
  }
};

void check_one_machine(const std::vector<Endpoint>& endpoints, const GlobalRanks& numbers) {
  RankSet elsewhere;
  for (std::size_t rank = 1; rank < endpoints.size(); ++rank) {
    if (endpoints[rank].machine != endpoints[0].machine)
      elsewhere.insert(numbers.of(static_cast<int>(rank)));
  }
  if (elsewhere.empty()) return;
  throw UsageError(fmt::format(
      "{} run{} on another machine (or in another network namespace) than rank {}; shared "
      "memory reaches the ranks of one machine only. Use the backend gloo.",
      describe_ranks(elsewhere), elsewhere.count() == 1 ? "s" : "", numbers.of(0)));
}

}  // namespace

bool Peer::ended() const {
  return watch && has_news(watch.get());
}

Membership join(BootstrapSockets links, int rank, int size, std::size_t memory_bytes,
                const base::Deadline& deadline, const GlobalRanks& numbers) {
  if (links.size() != static_cast<std::size_t>(rank == 0 ? size - 1 : 1)) {
    throw UsageError(
        fmt::format("rank {} of {} has {} links to the other ranks", rank, size, links.size()));
  }
  if (rank > 0) {
    return join_as_member(std::move(links.front()), rank, size, memory_bytes, deadline, numbers);
  }
  Coordinator host(size, memory_bytes, deadline, numbers);
  for (std::size_t i = 0; i < links.size(); ++i) {
    host.add_link(std::move(links[i]), static_cast<int>(i) + 1);
  }
  return host.run();
}

Membership join(Exchange& exchange, std::size_t memory_bytes, const base::Deadline& deadline,
                const GlobalRanks& numbers) {
  const int rank = exchange.rank();
  Endpoint mine{::getpid(), name_of_namespace("/proc/self/ns/pid"), machine_identity(),
                rank == 0 ? random_name() : ""};
  base::UniqueFd listener;
  if (rank == 0) listener = listen_abstract(mine.socket);
  std::vector<Endpoint> endpoints;
  for (const auto& blob : exchange.all_gather(mine.encode(), deadline)) {
    endpoints.push_back(Endpoint::decode(blob));
  }
  check_one_machine(endpoints, numbers);
  if (rank > 0) {
    base::UniqueFd link = connect_abstract(endpoints[0].socket);
    if (!link) throw_failure(lost(0, numbers), kConnecting);
    return join_as_member(std::move(link), rank, exchange.size(), memory_bytes, deadline, numbers);
  }
  Coordinator host(exchange.size(), memory_bytes, deadline, numbers);
  host.accept_at(std::move(listener));
  for (int other = 1; other < exchange.size(); ++other) {
    host.expect(other, endpoints[other].pids == mine.pids ? endpoints[other].pid : 0);
  }
  return host.run();
}

}  // namespace paceline::shm
