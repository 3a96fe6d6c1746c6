#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "base/parse.h"
#include "checks/checks.h"
#include "checks/units.h"
#include "launch/clip.h"

namespace paceline::doctor {
namespace {

// Who numbered this process, and by which variables.
std::string describe_launcher(const VariableFacts& facts, const base::Environment& environment) {
  const auto rank = fmt::format("rank {} of {}", environment.rank.value_or(0),
                                environment.world_size.value_or(1));
  if (environment.store_fd) return fmt::format("`paceline run` (PACELINE_STORE_FD): {}", rank);
  if (facts.set.contains("TORCHELASTIC_RUN_ID")) {
    return fmt::format("torchrun (TORCHELASTIC_RUN_ID): {}", rank);
  }
  if (environment.numbered_by_launched) {
    return fmt::format("{} ({}): {}", environment.launched->launcher,
                       environment.launched->variables, rank);
  }
  if (environment.rank) {
    return fmt::format("not known (RANK, WORLD_SIZE): {}", rank);
  }
  return "none: a program started here is a world of one rank";
}

Check check_launcher(const VariableFacts& facts) {
  Check check{.name = "launcher", .values = {{"name", nullptr}}};
  const auto& environment = facts.environment;
  if (environment && environment->launched) {
    check.values["name"] = environment->launched->launcher;
  }
  if (environment && environment->rank) {
    check.values["rank"] = *environment->rank;
    check.values["world_size"] = environment->world_size.value_or(1);
  }
  if (facts.error.empty()) {
    check.text = describe_launcher(facts, *environment);
    return check;
  }
  check.status = Status::error;
  check.text = facts.error;
  check.advice = "correct or unset these variables, or start programs with `paceline run`";
  return check;
}

Check check_in_force(const VariableFacts& facts) {
  constexpr std::size_t kLongest = 100;
  Check check{.name = "in_force", .values = facts.set};
  std::vector<std::string> texts;
  for (const auto& [name, value] : facts.set) {
    texts.push_back(fmt::format("{}={}", name, launch::clip(value, kLongest)));
  }
  check.text = texts.empty() ? "none" : fmt::format("{}", fmt::join(texts, ", "));
  return check;
}

Check check_closed(const VariableFacts& facts) {
  return {.name = "inherited",
          .status = Status::error,
          .text = fmt::format("{}: there is no such open descriptor, so ranks cannot meet",
                              fmt::join(facts.closed, ", ")),
          .advice =
              "unset what another job left behind; under `paceline run`, see which program before "
              "this one closes descriptors",
          .values = {{"closed", facts.closed}}};
}

void add_threads(const VariableFacts& facts, const char* variable, Group& group) {
  const auto found = facts.set.find(variable);
  if (found == facts.set.end()) return;
  const auto number = thread_count(found->second);
  if (number && *number <= facts.cores) return;
  std::string name = variable;
  std::ranges::transform(name, name.begin(), [](char c) { return c == '_' ? c : char(c | 0x20); });
  Check check{.name = name,
              .status = Status::warning,
              .text = fmt::format("{}={} is not a number of threads", variable, found->second),
              .advice = fmt::format("set a number from 1 to {}, or unset it: `paceline run` gives "
                                    "each process its share",
                                    facts.cores),
              .values = {{"value", found->second}, {"cores", facts.cores}}};
  if (number) {
    check.text = fmt::format("{}={} on {}: threads wait for each other in every operator", variable,
                             found->second, plural(facts.cores, "core", "cores"));
  }
  group.checks.push_back(std::move(check));
}

// GLOO_SOCKET_IFNAME may name several, comma separated.
void add_gloo_interface(const VariableFacts& facts, Group& group) {
  const auto found = facts.set.find("GLOO_SOCKET_IFNAME");
  if (found == facts.set.end()) return;
  for (const std::string_view name : base::split_at_commas(found->second)) {
    if (std::ranges::count(facts.interfaces, name) > 0) continue;
    group.checks.push_back(
        {.name = "gloo_interface",
         .status = Status::error,
         .text = fmt::format("GLOO_SOCKET_IFNAME={}: no interface '{}' with an address is up",
                             found->second, name),
         .advice = fmt::format("name one of {}, or unset it", fmt::join(facts.interfaces, ", ")),
         .values = {{"value", found->second}}});
    return;
  }
}

void add_master(const VariableFacts& facts, Group& group) {
  if (!facts.master || !facts.environment) return;
  const base::Environment& environment = *facts.environment;
  const std::string& name = *environment.master_addr;
  const std::string given =
      facts.set.contains("MASTER_ADDR")
          ? fmt::format("MASTER_ADDR={}", name)
          : fmt::format("{}, rank 0's host by {},", name, environment.launched->launcher);
  const bool is_needed = !environment.store_fd && environment.world_size.value_or(1) > 1;
  const bool is_one_machine = !is_needed || environment.world_size == environment.local_world_size;
  Check check{.name = "master_addr",
              .status = is_needed ? Status::error : Status::warning,
              .values = {{"value", name},
                         {"addresses", facts.master->addresses},
                         {"failure", facts.master->failure}}};
  if (!facts.master->failure.empty()) {
    check.text = fmt::format("{} cannot be resolved: {}", given, facts.master->failure);
    check.advice = "set MASTER_ADDR to rank 0's address, or to a name that all machines know";
    group.checks.push_back(std::move(check));
  } else if (!is_one_machine && is_loopback(facts.master->addresses.front())) {
    // Without a local size, all ranks may be on this machine.
    if (!environment.local_world_size) check.status = Status::note;
    const std::string& address = facts.master->addresses.front();
    check.text =
        fmt::format("{} is {}a loopback address: ranks on other machines cannot reach rank 0",
                    given, address == name ? "" : address + ", ");
    check.advice = "set MASTER_ADDR to rank 0's address in the network";
    if (address != name) {
      check.advice += fmt::format(", or give {} this address in /etc/hosts", name);
    }
    group.checks.push_back(std::move(check));
  }
}

}  // namespace

Group check_variables(const VariableFacts& facts) {
  Group group{"variables", {check_in_force(facts), check_launcher(facts)}};
  if (!facts.closed.empty()) group.checks.push_back(check_closed(facts));
  add_threads(facts, "OMP_NUM_THREADS", group);
  add_threads(facts, "MKL_NUM_THREADS", group);
  add_gloo_interface(facts, group);
  add_master(facts, group);
  return group;
}

}  // namespace paceline::doctor
