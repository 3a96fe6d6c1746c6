#include "nodes/network.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "base/errno_error.h"
#include "base/parse.h"
#include "base/unique_fd.h"
#include "nodes/rate.h"

namespace paceline::bench {
namespace {

// What a link passes at once after a pause: little beside what is measured, but more than the
// kernel's timer lets pile up at full rate.
constexpr double kBurstSeconds = 4e-3;
constexpr double kLeastBurst = 16 << 10;  // bytes
// In a fresh namespace nobody else has it.
constexpr const char* kMasterPort = "29500";

// Throws what a shell script says if it fails.
void run_script(const std::string& script) {
  std::string said;
  // NOLINTNEXTLINE(bugprone-command-processor): the scripts are this file's
  std::FILE* const output = ::popen(fmt::format("exec 2>&1\nset -e\n{}", script).c_str(), "re");
  if (output == nullptr) throw base::errno_error("cannot start a shell");
  std::array<char, 4096> part;
  while (const std::size_t size = std::fread(part.data(), 1, part.size(), output)) {
    said.append(part.data(), size);
  }
  if (::pclose(output) != 0) throw Error(fmt::format("cannot set up the nodes' network: {}", said));
}

int variable(const char* name, int least) {
  const char* const value = std::getenv(name);
  if (value == nullptr) throw Error(fmt::format("{} is not set", name));
  return base::parse_integer(name, value, least);
}

}  // namespace

std::string node_address(int node) {
  return fmt::format("10.0.0.{}", node + 1);
}

NamespaceProcess::NamespaceProcess() {
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw base::errno_error("cannot make a pipe");
  const base::UniqueFd ready(ends[0]);
  base::UniqueFd entered(ends[1]);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw base::errno_error("cannot start a process for a node");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int error = ::unshare(CLONE_NEWNET) == 0 ? 0 : errno;
    if (::write(entered.get(), &error, sizeof(error)) < 0 || ::getppid() != parent) ::_exit(1);
    while (true) ::pause();
  }
  entered.reset();
  int error = EPIPE;
  if (::read(ready.get(), &error, sizeof(error)) < 0) error = errno;
  if (error == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  throw base::errno_error(
      "cannot make a network namespace for a node; run this as root or under `unshare -rn`, or on "
      "one node: without --nodes, topology with --link none",
      error);
}

NamespaceProcess::~NamespaceProcess() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

Network::Network(int nodes, const std::string& rate) : nodes_(static_cast<std::size_t>(nodes)) {
  const std::string shaped =
      fmt::format("root tbf rate {} burst {:.0f} latency 50ms", rate,
                  std::max(bytes_per_second(rate) * kBurstSeconds, kLeastBurst));
  const std::string in_switch = fmt::format("nsenter -n -t {}", switch_.pid());
  std::string script = fmt::format(
      "{0} ip link add br0 type bridge\n"
      "{0} ip link set br0 up\n",
      in_switch);
  for (int node = 0; node < nodes; ++node) {
    const pid_t process = nodes_[static_cast<std::size_t>(node)].pid();
    script += fmt::format(
        "{in_switch} ip link add port{node} type veth peer name eth0 netns {process}\n"
        "{in_switch} ip link set port{node} master br0 up\n"
        "{in_switch} tc qdisc add dev port{node} {shaped}\n"
        "{in_node} ip link set lo up\n"
        "{in_node} ip addr add {address}/24 dev eth0\n"
        "{in_node} ip link set eth0 up\n"
        "{in_node} tc qdisc add dev eth0 {shaped}\n",
        fmt::arg("in_switch", in_switch), fmt::arg("node", node), fmt::arg("process", process),
        fmt::arg("shaped", shaped), fmt::arg("in_node", fmt::format("nsenter -n -t {}", process)),
        fmt::arg("address", node_address(node)));
  }
  run_script(script);
}

std::vector<pid_t> Network::processes() const {
  std::vector<pid_t> processes;
  for (const NamespaceProcess& node : nodes_) processes.push_back(node.pid());
  return processes;
}

void enter_node(const std::vector<pid_t>& processes) {
  const int nodes = static_cast<int>(processes.size());
  const int rank = variable("RANK", 0);
  const int ranks_of_each = variable("WORLD_SIZE", nodes) / nodes;
  const int node = rank / ranks_of_each;
  const std::string path =
      fmt::format("/proc/{}/ns/net", processes[static_cast<std::size_t>(node)]);
  const base::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || ::setns(file.get(), CLONE_NEWNET) != 0) {
    throw base::errno_error(fmt::format("cannot enter the namespace {}", path));
  }
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), 1);
  };
  set("LOCAL_RANK", std::to_string(rank % ranks_of_each));
  set("LOCAL_WORLD_SIZE", std::to_string(ranks_of_each));
  set("GROUP_RANK", std::to_string(node));
  set("GROUP_WORLD_SIZE", std::to_string(processes.size()));
  set("MASTER_ADDR", node_address(0));
  set("MASTER_PORT", kMasterPort);
  set("GLOO_SOCKET_IFNAME", "eth0");
  // The launcher's, which knows of one node.
  for (const char* name : {"PACELINE_BOOTSTRAP_SOCKETS", "PACELINE_STORE_FD"}) ::unsetenv(name);
}

}  // namespace paceline::bench
