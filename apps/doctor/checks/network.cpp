#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "checks/checks.h"

namespace paceline::doctor {
namespace {

Check check_loopback(const NetworkFacts& facts) {
  const bool is_up = std::ranges::any_of(facts.interfaces, &Interface::is_loopback);
  Check check{.name = "loopback", .values = {{"up", is_up}}};
  if (is_up) return check;
  check.status = Status::error;
  check.text =
      "the interface lo is down: Gloo has no address, and nothing on this machine meets over TCP";
  check.advice = "bring it up: ip link set lo up";
  return check;
}

Check check_interfaces(const NetworkFacts& facts) {
  Check check{.name = "interfaces", .values = {{"up", nlohmann::ordered_json::object()}}};
  std::vector<std::string> texts;
  for (const Interface& one : facts.interfaces) {
    check.values["up"][one.name] = one.addresses;
    if (!one.is_loopback) {
      texts.push_back(fmt::format("{} {}", one.name, fmt::join(one.addresses, " ")));
    }
  }
  if (texts.empty()) {
    check.status = Status::note;
    check.text = "none is up besides the loopback: ranks of this machine only";
  } else {
    check.text = fmt::format("{}", fmt::join(texts, ", "));
  }
  return check;
}

bool has_address(const NetworkFacts& facts, const std::string& address) {
  return std::ranges::any_of(facts.interfaces, [&](const Interface& one) {
    return std::ranges::count(one.addresses, address) > 0;
  });
}

// What other machines cannot do by the host's name; empty if there is nothing.
std::string trouble(const NetworkFacts& facts) {
  if (!facts.host.failure.empty()) {
    return fmt::format("cannot be resolved ({}), and Gloo needs an address", facts.host.failure);
  }
  const std::string& first = facts.host.addresses.front();
  if (is_loopback(first)) {
    return fmt::format(
        "resolves to {}, a loopback address: other machines cannot reach rank 0 here by it", first);
  }
  if (has_address(facts, first)) return "";
  return fmt::format("resolves to {}, which no interface here has", first);
}

// On a machine without a network, nobody looks for the name.
Check check_host_name(const NetworkFacts& facts) {
  const std::string address = reachable_address(facts.interfaces);
  const std::string why = address.empty() ? "" : trouble(facts);
  Check check{.name = "host_name",
              .values = {{"name", facts.host_name},
                         {"addresses", facts.host.addresses},
                         {"failure", facts.host.failure}}};
  if (why.empty()) {
    check.text = facts.host.failure.empty()
                     ? fmt::format("{}, {}", facts.host_name, facts.host.addresses.front())
                     : fmt::format("{}, without an address", facts.host_name);
    return check;
  }
  check.status = Status::warning;
  check.text = fmt::format("{} {}", facts.host_name, why);
  check.advice = fmt::format(
      "for ranks on several machines, set MASTER_ADDR (or --master-addr) to {0}, or give {1} this "
      "address in /etc/hosts",
      address, facts.host_name);
  return check;
}

}  // namespace

Group check_network(const NetworkFacts& facts) {
  return {"network", {check_loopback(facts), check_interfaces(facts), check_host_name(facts)}};
}

}  // namespace paceline::doctor
