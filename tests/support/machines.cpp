#include "support/machines.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace paceline::test {
namespace {

// The output of a shell command that has to succeed.
std::string shell(const std::string& script) {
  ChildProcess process({"sh", "-ec", script});
  if (process.wait() == 0) return process.out();
  throw std::runtime_error(fmt::format("'{}' failed: {}", script, process.err()));
}

// Of the namespace with the switch.
std::string switch_name() {
  return fmt::format("paceline-{}-switch", ::getpid());
}

}  // namespace

std::string Machines::why_not() {
  const std::string name = switch_name();
  ChildProcess probe(
      {"sh", "-c",
       fmt::format("ip netns add {0} && ip -n {0} link add probe type veth peer name "
                   "other && ip netns exec {0} unshare -u true; code=$?; ip netns del "
                   "{0}; exit $code",
                   name)});
  return probe.wait() == 0 ? "" : "no network namespaces can be made here: " + probe.err();
}

Machines::Machines(int count) : count_(count) {
  std::string script = fmt::format(
      "ip netns add {0}; ip -n {0} link add br0 type bridge; ip -n {0} link set br0 up;",
      switch_name());
  for (int machine = 0; machine < count; ++machine) {
    script += fmt::format(
        "ip netns add {0}; ip -n {0} link set lo up;"
        "ip -n {0} link add eth0 type veth peer name port{1} netns {2};"
        "ip -n {2} link set port{1} master br0 up;"
        "ip -n {0} addr add {3}/24 dev eth0; ip -n {0} link set eth0 up;",
        name(machine), machine, switch_name(), address(machine));
  }
  shell(script);
}

// NOLINTNEXTLINE(bugprone-exception-escape): a test may end by it
Machines::~Machines() {
  std::string script = fmt::format("ip netns del {};", switch_name());
  for (int machine = 0; machine < count_; ++machine) {
    script += fmt::format("ip netns del {};", name(machine));
  }
  ChildProcess removal({"sh", "-c", script});
  removal.wait();
}

std::string Machines::address(int machine) {
  return fmt::format("10.0.0.{}", machine + 1);
}

std::string Machines::name(int machine) const {
  return fmt::format("paceline-{}-{}", ::getpid(), machine);
}

std::vector<std::string> Machines::on(int machine, const std::vector<std::string>& command) const {
  std::vector<std::string> words{
      "ip",          "netns",   "exec",
      name(machine), "unshare", "-u",
      "sh",          "-c",      fmt::format("hostname machine{}; exec \"$@\"", machine),
      "sh"};
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

// The switch's end, so that the machine's own interface stays up.
void Machines::cut(int machine) const {
  shell(fmt::format("ip -n {} link set port{} nomaster", switch_name(), machine));
}

// The smallest burst that holds a packet, and a queue of a second.
void Machines::slow(int machine, const std::string& rate) const {
  for (const auto& [space, device] : {std::pair{switch_name(), fmt::format("port{}", machine)},
                                      std::pair{name(machine), std::string("eth0")}}) {
    shell(fmt::format("ip netns exec {} tc qdisc add dev {} root tbf rate {} burst 2kb latency 1s",
                      space, device, rate));
  }
}

void Machines::kill(int machine) const {
  std::istringstream pids(shell("ip netns pids " + name(machine)));
  for (pid_t pid = 0; pids >> pid;) ::kill(pid, SIGKILL);
}

std::string Machines::still_there() const {
  std::string all;
  for (int machine = 0; machine < count_; ++machine) {
    all += shell(
        fmt::format("ip netns pids {} | sed 's/^/machine{}: process /'", name(machine), machine));
  }
  return all;
}

std::string Machines::left_behind() const {
  return eventually([&] { return still_there().empty(); }) ? "" : still_there();
}

}  // namespace paceline::test
