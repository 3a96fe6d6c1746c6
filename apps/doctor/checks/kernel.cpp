#include <fmt/format.h>

#include "checks/checks.h"

namespace paceline::doctor {
namespace {

constexpr const char* kSandbox =
    "see whether a sandbox (seccomp, a container's profile) forbids it, and allow it there";

struct Feature {
  const char* name;
  std::string KernelFacts::*failure;
  Status status;
  const char* consequence;
  const char* advice;
};
constexpr Feature kFeatures[] = {
    {"sealed_memfd", &KernelFacts::sealed_memfd, Status::error,
     "the backend paceline has no shared memory", kSandbox},
    {"pidfd", &KernelFacts::pidfd, Status::warning,
     "the launcher is less certain about which rank failed first", kSandbox},
    {"futex", &KernelFacts::futex, Status::error, "ranks cannot wait for each other", kSandbox},
    {"credentials", &KernelFacts::credentials, Status::warning,
     "ranks watch each other by pipes instead of by process ids", kSandbox},
    {"subreaper", &KernelFacts::subreaper, Status::error, "`paceline run` cannot start", kSandbox},
    {"proc", &KernelFacts::proc, Status::error, "ranks of `paceline run` cannot meet",
     "mount it: mount -t proc proc /proc"},
    {"temporary_files", &KernelFacts::temporary_files, Status::warning,
     "`paceline run` keeps the errors of ranks in memory, and logs need --log-dir",
     "set TMPDIR to a directory that exists and is writable"},
};

Check check_feature(const Feature& feature, const KernelFacts& facts) {
  const std::string& failure = facts.*feature.failure;
  Check check{.name = feature.name, .values = {{"works", failure.empty()}}};
  if (failure.empty()) return check;
  check.status = feature.status;
  check.text = fmt::format("{}: {}", failure, feature.consequence);
  check.advice = feature.advice;
  return check;
}

Check check_single_copy(const KernelFacts& facts) {
  Check check{.name = "single_copy",
              .values = {{"works", facts.single_copy.empty()}, {"ptrace_scope", nullptr}}};
  if (facts.ptrace_scope) check.values["ptrace_scope"] = *facts.ptrace_scope;
  if (facts.single_copy.empty()) return check;
  check.status = Status::note;
  const bool is_yama = facts.ptrace_scope.value_or(0) > 0;
  check.text = fmt::format(
      "{}{}; scatter and all_to_all then copy large tensors twice", facts.single_copy,
      is_yama ? fmt::format(" (kernel.yama.ptrace_scope is {})", *facts.ptrace_scope) : "");
  return check;
}

}  // namespace

Group check_kernel(const KernelFacts& facts) {
  Group group{"kernel", {}};
  for (const Feature& feature : kFeatures) group.checks.push_back(check_feature(feature, facts));
  group.checks.push_back(check_single_copy(facts));
  return group;
}

}  // namespace paceline::doctor
